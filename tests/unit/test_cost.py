"""Costs learned from a server's own rounds."""

import math

import numpy as np
import pytest

from libraspec_sglang.controller.cost import BatchCost, Elsewhere, LineCost


class TestCost:
    def line(self):
        return LineCost(prior_share=0.01, prior_spread=2.0)

    def test_line_is_found(self):
        cost = self.line()
        random = np.random.default_rng(0)
        for _ in range(400):
            rows = int(random.integers(1, 60))
            cost.observe(rows, 0.007 + 0.0001 * rows + random.normal(0, 0.0002))
        assert cost.line() == pytest.approx((0.007, 0.0001), rel=0.05)

    def test_constant_rows_fall_back_on_the_prior_slope(self):
        cost = self.line()
        for _ in range(50):
            cost.observe(10, 0.02)
        start, slope = cost.line()
        assert start + 10 * slope == pytest.approx(0.02)
        assert slope == pytest.approx(0.0002)

    def test_outliers_are_cut_and_costs_stay_positive(self):
        cost = self.line()
        for i in range(100):
            cost.observe(5 + i % 3, 0.01)
        cost.observe(5, 30.0)
        start, slope = cost.line()
        assert start >= 0 and slope >= 0
        assert start + 5 * slope < 0.012

    def test_a_first_forward_that_compiled_something_is_forgotten(self):
        """Three seconds where ten milliseconds are usual: no price of anything."""
        cost = self.line()
        cost.observe(4, 3.0)
        for rows in (2, 6, 9):
            cost.observe(rows, 0.01)
        start, slope = cost.line()
        assert start + 4 * slope == pytest.approx(0.01, rel=0.05)
        assert cost.rounds == 3

    def test_a_young_line_is_not_bent_by_an_outlier_nor_shy_of_dear_rows(self):
        cost = self.line()
        cost.observe(2, 0.01)
        cost.observe(4, 5.0)
        assert sum(cost.line()) < 0.04
        dear = self.line()
        for rows in (2, 24, 2, 24):  # in proportion to rows: within what may be
            dear.observe(rows, 0.005 * rows)
        assert dear.mean() == pytest.approx((13, 0.065), rel=1e-2)

    def test_with_a_profile_the_first_outlier_is_cut_already(self):
        cost = BatchCost(0.01, depth=8, profile=lambda batch, rows: 0.01 + 0.001 * rows)
        cost.observe(1, 3, 3.0)
        assert cost.seconds(1)[3] < 3.1 * 0.013
        for _ in range(5):
            cost.observe(1, 3, 0.013)
        assert cost.seconds(1)[3] == pytest.approx(0.013, rel=0.5)

    def test_what_is_not_a_time_is_ignored(self):
        cost = self.line()
        cost.observe(4, 1.0)
        for seconds in (float("nan"), float("inf"), -1.0):
            cost.observe(4, seconds)
        assert sum(cost.line()[i] * (1, 4)[i] for i in (0, 1)) == pytest.approx(1.0)

    def test_requests_are_not_charged_to_rows(self):
        """Rounds of 1 and of 4 requests: a request costs 4, a row 0.1, whatever the mixture."""
        cost = BatchCost(0.01, depth=8)
        random = np.random.default_rng(1)
        for _ in range(200):
            for batch in (1, 4):
                rows = batch * int(random.integers(2, 9))
                cost.observe(batch, rows, 3.0 + 4.0 * batch + 0.1 * rows)
        for batch in (1, 4):
            seconds = cost.seconds(batch)
            assert len(seconds) == 9 * batch + 1
            assert seconds[9] - seconds[8] == pytest.approx(0.1, rel=0.15)
            assert seconds[0] == pytest.approx(3.0 + 4.0 * batch, rel=0.02)
        slopes = [cost.seconds(batch)[1] - cost.seconds(batch)[0] for batch in (4, 5)]
        assert slopes[0] == slopes[1]  # 5 was never seen: the nearest

    def test_plain_decoding_has_a_price_of_its_own(self):
        """A step below the line through the other rounds, at every batch size."""
        random = np.random.default_rng(0)
        cost = BatchCost(0.01, depth=8)

        def true(batch, rows):
            return (3.0 + batch + 0.1 * rows) * (0.8 if rows == batch else 1.0)

        for _ in range(300):
            for batch in (1, 4):
                rows = batch if random.uniform() < 0.1 else batch * int(random.integers(2, 9))
                cost.observe(batch, rows, true(batch, rows))
        for batch in (1, 4):
            got = cost.seconds(batch)[batch : 8 * batch + 1]
            expected = [true(batch, r) for r in range(batch, 8 * batch + 1)]
            assert got[0] == pytest.approx(expected[0], rel=1e-6)
            assert got == pytest.approx(expected, rel=0.02)
        unseen = cost.seconds(5)
        assert unseen[5] / (2 * unseen[6] - unseen[7]) == pytest.approx(
            0.8, rel=0.02
        )  # as 4 has it

    def test_plain_is_never_dearer_than_a_row_more(self):
        cost = BatchCost(0.01, depth=8)
        for _ in range(20):
            cost.observe(2, 2, 2.0)
            cost.observe(2, 8, 1.0)
        assert cost.seconds(2)[2] == cost.seconds(2)[3]

    def test_plain_follows_the_machine_though_it_is_rarely_seen(self):
        """Twice as slow from some day on; of 64 rounds one is plain."""
        cost = BatchCost(0.01, depth=8)
        for slow in (1.0, 2.0):
            for turn in range(1500):
                cost.observe(
                    4, 4 if turn % 64 == 0 else 12, slow * (1.0 if turn % 64 == 0 else 1.5)
                )
        assert cost.seconds(4)[4] == pytest.approx(2.0, rel=0.05)
        assert cost.seconds(4)[12] == pytest.approx(3.0, rel=0.05)

    @pytest.mark.parametrize("rows", [2, 6])
    def test_what_was_long_not_seen_is_still_known(self, rows):
        """One kind of round only, for so long that the other's weight would underflow."""
        cost = BatchCost(0.01, depth=8)
        cost.observe(2, 8 - rows, 1.0)
        for _ in range(400_000):
            cost.observe(2, rows, 1.0)
        assert np.isfinite(cost.seconds(2)).all()
        assert cost.seconds(2)[2:] == pytest.approx(1.0, rel=0.2)

    def test_a_profile_gives_the_shape_from_the_start(self):
        def stepped(batch, rows):
            return batch + np.ceil(rows / 8)

        cost = BatchCost(0.01, depth=15, profile=stepped)
        assert cost.known
        assert cost.seconds(2).tolist() == stepped(2, np.arange(33)).tolist()

    def test_rounds_stretch_and_shift_a_profile(self):
        """Twice as slow; then a constant more, as of a longer context. The step stays."""

        def stepped(batch, rows):
            return 4 + np.ceil(rows / 8)

        random = np.random.default_rng(0)
        slow, late = (BatchCost(0.01, depth=15, profile=stepped) for _ in range(2))
        for _ in range(600):
            rows = int(random.integers(1, 17))
            slow.observe(1, rows, 2.0 * stepped(1, rows))
            late.observe(1, rows, 3.0 + stepped(1, rows))
        expected = stepped(1, np.arange(17))
        assert slow.seconds(1) == pytest.approx(2.0 * expected, rel=1e-6)
        at = late.seconds(1)
        assert at[1:] == pytest.approx(3.0 + expected[1:], rel=0.12)
        assert at[9] - at[8] > 5 * (at[8] - at[7])


class TestElsewhere:
    def test_it_starts_from_the_profile_and_knows_batch_sizes_apart(self):
        other = Elsewhere(0.5)
        assert other.seconds(3) == 0.5
        for _ in range(200):
            other.observe(1, 1.0)
            other.observe(8, 3.0)
        assert (other.seconds(1), other.seconds(8)) == pytest.approx((1.0, 3.0))
        assert other.seconds(6) == other.seconds(8)
        assert other.pace == pytest.approx(1.0)

    def test_the_pace_follows_within_a_few_rounds_and_one_hiccup_hardly_moves_it(self):
        other = Elsewhere()
        for _ in range(100):
            other.observe(1, 1.0)
        other.observe(1, 50.0)
        assert other.pace < 1.4
        for _ in range(20):
            other.observe(1, 1.0)
        for _ in range(8):
            other.observe(1, 2.0)
        assert other.pace == pytest.approx(1.8, abs=0.2)

    def test_what_is_not_a_time_is_ignored(self):
        other = Elsewhere()
        for seconds in (math.nan, -1.0, 0.0, math.inf):
            other.observe(1, seconds)
        assert (other.pace, other.seconds(1)) == (1.0, 0.0)

    def test_a_first_round_that_stalled_is_forgotten(self):
        other = Elsewhere()
        other.observe(1, 2.0)
        for _ in range(10):
            other.observe(1, 0.002)
        assert other.seconds(1) == pytest.approx(0.002)
        assert other.pace == pytest.approx(1.0)
