"""Batch allocation, calibration, cost and the policy made of them."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libraspec_sglang.controller import criterion
from libraspec_sglang.controller.batch import allocate
from libraspec_sglang.controller.calibration import Calibration
from libraspec_sglang.controller.cost import BatchCost, Elsewhere, LineCost
from libraspec_sglang.controller.cost_file import Cost, Forward
from libraspec_sglang.controller.libra import Libra
from libraspec_sglang.controller.policy import RoundTimes

unit = st.floats(0.0, 1.0, width=32)


def survivals(bs, depth):
    rows = st.lists(unit, min_size=depth, max_size=depth)
    return st.lists(rows, min_size=bs, max_size=bs).map(lambda q: np.cumprod(np.array(q), axis=1))


def rate(survival, lengths, cost, draft_cost):
    tokens = sum(1 + row[:n].sum() for row, n in zip(survival, lengths, strict=True))
    return tokens / (draft_cost + cost(int(sum(lengths)) + len(lengths)))


stepped = st.lists(st.floats(0.01, 3.0), min_size=40, max_size=40).map(
    lambda steps: lambda rows: 1.0 + float(np.sum(steps[: int(rows)]))
)


@settings(max_examples=60)
@given(
    survivals(3, 3),
    stepped,
    st.floats(0.0, 5.0),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_allocate_equals_exhaustive_search(survival, cost, draft_cost, caps):
    """Any cost curve, not only straight ones."""
    got = allocate(survival, cost, caps, draft_cost)
    assert all(n <= cap for n, cap in zip(got, caps, strict=True))
    best = max(
        rate(survival, lengths, cost, draft_cost)
        for lengths in itertools.product(*(range(cap + 1) for cap in caps))
    )
    assert rate(survival, got, cost, draft_cost) == pytest.approx(best, rel=1e-9)


@given(st.lists(st.floats(0.05, 1.0), min_size=8, max_size=8), st.floats(0.01, 0.5))
def test_one_request_stops_where_theorem_3_5_says(q, slope):
    """Extend while the next survival exceeds c times the rate so far; the peak is unique."""
    survival = np.cumprod(np.array([q]), axis=1)
    length = int(allocate(survival, lambda rows: 1.0 + slope * rows)[0])
    tau = 1.0 + np.concatenate(([0.0], np.cumsum(survival[0])))
    time = 1.0 + slope * (1 + np.arange(9))
    for d in range(8):
        improves = survival[0, d] > slope * tau[d] / time[d] * (1 + 1e-12)
        if d < length:
            assert survival[0, d] >= slope * tau[d] / time[d] * (1 - 1e-9)
        if d == length:
            assert not improves
            break


@given(survivals(2, 4), st.integers(0, 3))
def test_more_confidence_never_verifies_less_of_a_request(survival, position):
    cost = lambda rows: 4.0 + 0.3 * rows  # noqa: E731
    before = allocate(survival[:1], cost)[0]
    raised = survival[:1].copy()
    raised[0, : position + 1] = np.maximum(raised[0, : position + 1], raised[0, position] + 0.1)
    raised = np.minimum(raised, 1.0)
    assert allocate(raised, cost)[0] >= min(before, position + 1)


def test_allocate_defined_answers():
    flat = lambda rows: 1.0  # noqa: E731
    assert allocate(np.full((2, 3), np.nan), flat).tolist() == [0, 0]
    assert allocate(np.ones((2, 3)), flat, caps=[0, 2]).tolist() == [0, 2]
    assert allocate(np.empty((3, 0)), flat).tolist() == [0, 0, 0]
    assert allocate(np.ones((1, 4)), lambda rows: 1.0 * rows).tolist() == [0]  # ties: fewer rows
    assert allocate([[0.5, 0.9]], flat).tolist() == [2]  # a rise is cut to its predecessor


def test_allocate_refuses_caps_of_another_kind():
    for caps in ([1], [1, 2, 3, 4], [1.5, 1.0, 0.0]):
        with pytest.raises(ValueError, match="caps must be 3 integers"):
            allocate(np.ones((3, 4)), lambda rows: 1.0, caps)


def test_expected_gain_matches_criterion():
    q = [0.9, 0.5, 0.2]
    assert np.allclose(np.cumprod(q).cumsum(), criterion.expected_accepted(q))


class TestCalibration:
    def test_without_evidence_it_is_the_confidence(self):
        q = np.array([[0.3, 0.9]])
        assert Calibration(4).probability(q) == pytest.approx(q, rel=1e-6)
        assert Calibration(4).probability(np.array([[np.nan]])).tolist() == [[0.0]]

    def test_deeper_than_the_table_is_refused(self):
        with pytest.raises(ValueError, match="9 positions, at most 4"):
            Calibration(4).probability(np.full((2, 9), 0.5))

    def learn(self, truth, rounds=600, depth=4, bs=2, verified=None, seed=0):
        """Feed rounds in which token k is accepted with probability truth(q)."""
        random = np.random.default_rng(seed)
        table = Calibration(depth)
        for _ in range(rounds):
            q = random.uniform(0.05, 0.95, (bs, depth))
            hits = random.uniform(size=q.shape) < truth(q)
            accepted = np.cumprod(hits, axis=1).sum(1)
            seen = np.full(bs, depth) if verified is None else np.full(bs, verified)
            table.update(q, seen, np.minimum(accepted, seen))
        return table

    def test_it_learns_an_overconfident_drafter(self):
        table = self.learn(lambda q: 0.5 * q, rounds=4000)
        q = np.array([[0.2, 0.4, 0.6, 0.8]])
        error = np.abs(table.probability(q) - 0.5 * q)
        assert error.max() < 0.15
        assert error.mean() < 0.06
        assert np.abs(q - 0.5 * q).max() == pytest.approx(0.4)

    def test_censored_positions_teach_nothing(self):
        """Positions after a miss and positions not verified stay at the prior."""
        table = Calibration(3)
        for _ in range(50):
            table.update(np.array([[0.5, 0.5, 0.5]]), np.array([2]), np.array([0]))
        assert table._seen[0].sum() > 0
        assert table._seen[1:].sum() == 0

    def test_forgetting_follows_a_change(self):
        table = self.learn(lambda q: np.zeros_like(q), rounds=3000)
        assert table.probability(np.array([[0.5]]))[0, 0] < 0.1
        random = np.random.default_rng(1)
        for _ in range(6000):
            q = random.uniform(0.4, 0.6, (1, 1))
            table.update(q, np.array([1]), np.array([1]))
        assert table.probability(np.array([[0.5]]))[0, 0] > 0.7

    def test_one_request_cannot_poison_the_rest(self):
        """In a batch of 8, seven accept everything; one long stream of misses counts for little."""
        table = Calibration(24)
        for _ in range(200):
            q = np.full((8, 24), 0.5)
            verified = np.array([24] + [1] * 7)
            accepted = np.array([24] + [0] * 7)
            table.update(q, verified, accepted)
        # One request gave 24 of 31 observations a round, all hits; position 1 still tells of
        # seven misses to one hit.
        assert table.probability(np.array([[0.5]]))[0, 0] < 0.35

    def test_expected_calibration_error_falls(self):
        truth = lambda q: q**2  # noqa: E731
        table = self.learn(truth)
        q = np.random.default_rng(7).uniform(0.05, 0.95, (500, 4))
        before = np.abs(q - truth(q)).mean()
        after = np.abs(table.probability(q) - truth(q)).mean()
        assert after < before / 2
        # Its own account, of outcomes as they came: the mean of |q - q^2| is 1 / 6.
        said_before, said_after = table.error()
        assert said_before == pytest.approx(before, abs=0.03)
        assert said_after < said_before / 2

    def test_no_error_before_there_were_outcomes(self):
        assert np.isnan(Calibration(4).error()).all()


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


def decide(libra, confidence, cap):
    caps = torch.full((len(confidence),), cap)
    return libra.decide(torch.from_numpy(confidence), caps).numpy()


def play(libra, rounds, *, accept, confidence, slope, draft_slope, bs=1, depth=24, base=1.0):
    """Run rounds against a made-up machine and text; returns (tokens, seconds, last width)."""
    requests = [f"r{i}" for i in range(bs)]
    tokens = seconds = 0.0
    width = 0
    for _ in range(rounds):
        width = libra.first_draft(requests, depth)
        q = np.tile(confidence[:width], (bs, 1))
        lengths = decide(libra, q, depth) if width else np.zeros(bs, dtype=int)
        taken = np.minimum(accept, lengths)
        verify_rows, draft_rows = int(bs + lengths.sum()), bs * (width + 1) if width else 0
        draft_time = 0.4 * base + draft_slope * draft_rows if width else 0.0
        verify_time = base + slope * verify_rows
        libra.learn(requests, q, lengths, taken)
        libra.learn_times(
            RoundTimes(bs, draft_rows, draft_time, verify_rows, verify_time, elsewhere=0.2)
        )
        tokens += float((1 + taken).sum())
        seconds += 0.2 + draft_time + verify_time
    return tokens, seconds, width


def stepped_profile():
    """Rows are free up to 4, then a step of the whole forward."""
    return Cost(
        version=1, device="d", target="t", drafter="f", measured=True, how="made up", elsewhere=0.2,
        verify=Forward(interpolation="step", rows=[4, 8, 16, 32], seconds=[1.0, 2.0, 4.0, 8.0]),
        draft=Forward(rows=[1], seconds=[0.4]),
    )  # fmt: skip


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


class TestLibra:
    def test_with_a_profile_the_first_round_is_decided_by_it(self):
        libra = Libra(block_size=15, max_length=24, cost=stepped_profile())
        assert libra.first_draft(["a"], 24) > 0
        lengths = decide(libra, np.full((1, 24), 0.8), 24)
        assert lengths.tolist() == [3]  # with its own row, the step

    def test_predictable_text_is_drafted_wide(self):
        libra = Libra(block_size=15, max_length=24)
        tokens, seconds, width = play(
            libra, 200, accept=24, confidence=np.full(24, 0.99), slope=0.005, draft_slope=0.002
        )
        assert width == 24
        assert tokens / seconds > 10 * (1 / 1.2)

    def test_hopeless_text_is_decoded_plainly_and_probed_rarely(self):
        libra = Libra(block_size=15, max_length=24)
        play(libra, 200, accept=0, confidence=np.full(24, 0.02), slope=0.05, draft_slope=0.02)
        tokens, seconds, _ = play(
            libra, 400, accept=0, confidence=np.full(24, 0.02), slope=0.05, draft_slope=0.02
        )
        plain = 1 / (0.2 + 1.0 + 0.05)
        assert tokens / seconds > 0.98 * plain  # never below plain decoding by more than 2 %

    def test_it_returns_to_drafting_when_text_becomes_predictable(self):
        libra = Libra(block_size=15, max_length=24)
        play(libra, 300, accept=0, confidence=np.full(24, 0.02), slope=0.05, draft_slope=0.02)
        *_, width = play(
            libra, 300, accept=24, confidence=np.full(24, 0.99), slope=0.005, draft_slope=0.002
        )
        assert width >= 15

    def test_dear_verification_at_load_shortens(self):
        confidence = np.full(24, 0.8)
        lengths = {}
        for bs in (1, 32):
            libra = Libra(block_size=15, max_length=24)
            machine = {"slope": 0.02, "draft_slope": 0.002, "bs": bs}
            *_, width = play(libra, 200, accept=4, confidence=confidence, **machine)
            assert width > 0
            q = np.tile(confidence[:width], (bs, 1))
            lengths[bs] = decide(libra, q, 24).mean()
        assert lengths[32] < lengths[1]

    def test_what_plain_decoding_costs_is_looked_at_where_drafting_seems_to_pay(self):
        """Rows are dear, and rounds that draft alike would never show it: plain is found best."""
        libra = Libra(block_size=7, max_length=12)
        text = {"accept": 0, "confidence": np.full(12, 0.5), "depth": 12}
        *_, width = play(libra, 120, slope=0.3, draft_slope=0.0, bs=4, **text)
        assert width in (0, 3)  # plain, or a trial draft
        assert (
            np.diff(libra.verify_cost.seconds(4))[8] > 0.1
        )  # the prior alone says a tenth of that

    def test_a_machine_that_gets_slower_for_a_while_is_not_a_price_of_rows(self):
        """Twice as slow for 30 rounds at a time; what is known of rows stays right."""
        random = np.random.default_rng(0)
        libra = Libra(block_size=15, max_length=24)
        for turn in range(1200):
            pace = 2.0 if turn // 30 % 2 else 1.0
            rows = int(random.integers(2, 9)) + (8 if pace > 1.0 else 0)  # confounded with it
            times = [pace * t for t in (0.4, 1.0 + 0.01 * rows, 0.2)]
            libra.learn_times(RoundTimes(1, 16, times[0], rows, times[1], elsewhere=times[2]))
        seconds = libra.verify_cost.seconds(1)
        # At the usual pace, in between, ten rows cost 0.15. Without Elsewhere it would be 1.24.
        assert 0.05 < seconds[20] - seconds[10] < 0.4

    def test_within_two_percent_of_the_best_static_width_on_steady_text(self):
        """On text that never changes, no static length is better."""
        for accept, slope, draft_slope in ((3, 0.02, 0.01), (8, 0.01, 0.01), (1, 0.08, 0.03)):
            text = {"accept": accept, "confidence": np.where(np.arange(24) < accept, 0.97, 0.05)}
            machine = {"slope": slope, "draft_slope": draft_slope}
            libra = Libra(block_size=15, max_length=24)
            play(libra, 200, **text, **machine)
            tokens, seconds, _ = play(libra, 200, **text, **machine)
            static = max(
                (1 + min(accept, d))
                / (0.2 + (0.4 + draft_slope * (d + 1) if d else 0) + 1 + slope * (1 + d))
                for d in range(25)
            )
            assert tokens / seconds > 0.98 * static

    def test_a_request_inside_something_predictable_is_drafted_wider(self):
        """Spans of 24 tokens between stretches where one token is accepted."""
        random = np.random.default_rng(0)
        libra = Libra(block_size=15, max_length=24)
        left, widths = 0, {True: [], False: []}
        for turn in range(1500):
            width = libra.first_draft(["a"], 24)
            if turn > 1000:
                widths[libra._memory.kinds(["a"]) == [1]].append(width)
            if left == 0 and random.uniform() < 0.05:
                left = 48
            reach = left if left else 1
            q = np.where(np.arange(24) < reach, 0.95, 0.1)[None, :width]
            lengths = decide(libra, q, 24) if width else np.zeros(1, dtype=np.int64)
            accepted = np.minimum(lengths, reach)
            left = max(left - int(accepted[0]) - 1, 0)
            libra.learn(["a"], q, lengths, accepted)
            rows = int(lengths[0]) + 1
            draft = 0.2 + 0.06 * width if width else 0.0
            libra.learn_times(RoundTimes(1, width + 1, draft, rows, 1.0 + 0.02 * rows, 0.2))
        assert np.mean(widths[True]) > 2 * np.mean(widths[False])

    def test_each_request_is_drafted_as_wide_as_pays_for_its_kind(self):
        """One request of three accepts everything, the others nothing: their widths part."""
        random = np.random.default_rng(0)
        libra, requests, drafted = Libra(block_size=15, max_length=24), ["a", "b", "c"], []
        for turn in range(400):
            widths = libra.first_drafts(requests, [24, 24, 24])
            if turn >= 300:
                drafted.append(widths)
            reach = np.array([24, 0, 0])
            q = np.full((3, max(widths)), np.nan)
            for row, (width, far) in enumerate(zip(widths, reach, strict=True)):
                q[row, :width] = np.where(np.arange(width) < far, 0.95, 0.1)
            q += random.normal(0, 0.01, q.shape)
            lengths = decide(libra, q, 24) if any(widths) else np.zeros(3, dtype=np.int64)
            assert (lengths <= widths).all()  # nothing is verified that was not drafted
            libra.learn(requests, q, lengths, np.minimum(lengths, reach))
            rows, draft_rows = int(lengths.sum()) + 3, sum(widths) + 3 if any(widths) else 0
            draft = 0.4 + 0.02 * draft_rows if draft_rows else 0.0
            libra.learn_times(RoundTimes(3, draft_rows, draft, rows, 1.0 + 0.02 * rows, 0.2))
        assert np.median(drafted, axis=0).tolist() == [24, 0, 0]
        wider = [(b > 0) + (c > 0) for _, b, c in drafted]
        assert max(wider) == 1  # one request shows what a wider draft would bring

    def test_a_request_without_a_draft_teaches_nothing(self):
        libra = Libra(block_size=3, max_length=4)
        nan = [np.nan, np.nan]
        libra.learn(["a"], np.array([[0.5, 0.5]]), np.array([2]), np.array([2]))
        before = libra._memory._taken.copy()
        libra.learn(["a"], np.array([nan]), np.array([0]), np.array([0]))
        assert libra._memory.kinds(["a"]) == [1]
        assert (libra._memory._taken == before).all()
        libra.learn(["a", "b"], np.array([[0.5, np.nan], [0.5, 0.5]]), np.ones(2), np.ones(2))
        assert libra._memory.kinds(["a", "b"]) == [1, 0]  # of one token drafted, of two

    def test_nothing_is_verified_that_was_not_drafted(self):
        """A low confidence that often holds would make NaN, as no confidence, worth a row."""
        libra = Libra(block_size=3, max_length=4)
        for _ in range(60):
            libra.learn_times(RoundTimes(2, 10, 0.5, 6, 1.0, 0.1))
            low = np.full((2, 4), 0.02)
            decide(libra, low, 4)
            libra.learn(["a", "b"], low, np.full(2, 4), np.full(2, 4))
        lengths = decide(libra, np.array([[0.02, np.nan, np.nan], [np.nan] * 3]), 4)
        assert lengths.tolist() == [1, 0]

    def test_the_drafts_of_a_round_are_paid_for_as_they_were(self):
        """Rows that one request does not draft are not charged to the round."""
        dear = Cost(
            version=1, device="d", target="t", drafter="f", measured=True, how="made up",
            elsewhere=0.0, verify=Forward(rows=[1, 100], seconds=[1.0, 10.9]),
            draft=Forward(rows=[1, 100], seconds=[0.1, 10.0]),
        )  # fmt: skip
        libra = Libra(block_size=8, max_length=8, cost=dear)
        q = np.where(np.arange(8) < [[8], [0]], 0.8, np.nan)
        got = decide(libra, q, 8)
        tokens = 2 + np.concatenate(([0.0], np.cumsum(np.cumprod(q[0]))))
        rates = tokens / (dear.draft(2, np.array([10]), 0)[0] + 1.0 + 0.1 * (1 + np.arange(9)))
        assert got.tolist() == [int(rates.argmax()), 0]

    def test_a_request_that_may_draft_wider_shows_what_that_brings(self):
        libra = Libra(block_size=8, max_length=24)
        libra.learn_times(RoundTimes(2, 18, 0.5, 6, 1.0, 0.1))
        widths = [libra.first_drafts(["g", "a"], [0, 24]) for _ in range(60)]
        settled = np.median([w[1] for w in widths])
        assert max(w[1] for w in widths) > settled > 0

    def test_caps_are_each_request_s_own(self):
        libra = Libra(block_size=15, max_length=24)
        assert libra.first_drafts(["a", "b", "c"], [3, 0, 24]) == [3, 0, 15]

    def test_what_a_narrow_draft_leaves_counts_only_where_rounds_go_on_better(self):
        """Spans of exactly 5: one round of width 5, three of width 1, half of it taken as true."""
        from libraspec_sglang.controller import libra as module

        span = np.array([1.0] * 5 + [0.0] * 3)
        alike = np.stack([np.tile(span, (10, 1))] * 2)
        count = np.array([10, 10])
        assert module._taken_later(alike, count)[0] == pytest.approx(np.ones(9))

        better = np.stack([np.tile(span, (10, 1)), np.ones((10, 8))])
        factors = module._taken_later(better, count)[0]
        going_on = module.CONTINUED * (9 / 6 - 1)
        lost, found = 2.0, 6 / 3
        assert factors[1] == pytest.approx(1 + going_on * (found / lost - 1))
        assert factors[3] == pytest.approx(1 + going_on * ((6 / 2) / 4 - 1))
        assert factors[5:] == pytest.approx(1.0)
        assert (module._taken_later(better, np.array([10, 7])) == 1.0).all()

    def test_memory_of_requests_is_bounded(self):
        from libraspec_sglang.controller import libra as module

        libra = Libra(block_size=3, max_length=4)
        for i in range(module.REQUESTS_REMEMBERED + 50):
            libra.learn([f"r{i}"], np.array([[0.5, 0.5]]), np.array([2]), np.array([2]))
        assert len(libra._memory._inside) == module.REQUESTS_REMEMBERED

    def test_caps_bound_the_draft(self):
        libra = Libra(block_size=15, max_length=24)
        assert libra.first_draft(["a"], 3) == 3
        assert libra.first_draft(["a"], 0) == 0
