"""What a confidence turns out to be worth."""

import numpy as np
import pytest

from libraspec_sglang.controller.calibration import Calibration


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
