"""The fit of a profile, on times that are known; the measuring itself runs in test_profiled."""

import itertools

import numpy as np
import pytest

from libraspec_sglang.observe import profile

HEADER = {"device": "d", "target": "t", "drafter": "f"}


def stepped(batch, rows, context):
    """A memory-bound flat, a tile step, a slope; attention and requests cost too."""
    table = 5e-3 + (rows > 8) * 2e-3 + np.maximum(rows - 32, 0) * 1e-4
    return table + 2e-4 * batch + 3e-7 * context + 2e-8 * rows / batch * context


def points(cost=stepped, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    return [
        (b, b * (d + 1), b * c, float(cost(b, b * (d + 1), b * c) * (1 + noise * random.normal())))
        for b, d, c in itertools.product((1, 2, 4, 8), (0, 1, 3, 7, 15), (100, 800))
    ]


def trace_round(batch=2, length=3, context=100, seconds=0.01, gap=0.001):
    parts = {"window": 0.0, "draft": 0.004, "decide": 0.0, "layout": 0.0, "verify": seconds,
             "accept": 0.0, "commit": 0.0, "result": 0.0}  # fmt: skip
    return {
        "requests": [f"r{i}" for i in range(batch)],
        "verified": [length + 1] * batch,
        "context": [context] * batch,
        "confidence": [[0.5] * length] * batch,
        "seconds": parts,
        "gap": gap,
    }


class TestFitForward:
    def test_any_shape_is_found(self):
        forward, errors = profile.fit_forward(points())
        assert errors.max() < 0.01
        assert forward.per_request == pytest.approx(2e-4, rel=0.05)
        assert forward.per_context_token == pytest.approx(3e-7, rel=0.05)
        assert forward.per_row_context == pytest.approx(2e-8, rel=0.05)
        assert forward(1, 16, 0) - forward(1, 8, 0) == pytest.approx(2e-3, rel=0.05)  # the step
        assert forward(1, 8, 0) - forward(1, 1, 0) < 1e-4  # the flat

    def test_noise_is_reported_and_the_table_never_falls(self):
        forward, errors = profile.fit_forward(points(noise=0.1))
        assert 0.01 < np.median(errors) < 0.15
        assert forward.seconds == sorted(forward.seconds)
        assert min(forward.per_request, forward.per_context_token, forward.per_row_context) >= 0

    def test_no_cost_falls_below_zero(self):
        """Times that fall with everything: the closest cost that does not."""
        forward, _ = profile.fit_forward(points(lambda b, rows, c: 1e-2 / rows / b))
        assert forward.seconds == sorted(forward.seconds)
        assert forward(1, 1) > 0


class TestFit:
    def rounds(self):
        return [
            trace_round(batch, length, context, seconds=stepped(batch, rows, batch * context))
            for batch, length, context in itertools.product((1, 2, 4), (1, 3, 7), (100, 500))
            for rows in [batch * (length + 1)]
            for _ in range(profile.LEAST_ROUNDS)
        ]

    def test_a_cost_file_comes_of_a_trace(self, tmp_path):
        from libraspec_sglang.controller import cost_file

        cost = profile.fit(HEADER, self.rounds(), (1, 2, 4))
        assert cost(2, 8, 200) == pytest.approx(stepped(2, 8, 200), rel=0.02)
        assert cost.draft(2, 8, 200) == pytest.approx(0.004, rel=0.01)
        assert cost.elsewhere == pytest.approx(0.001)
        assert cost.measured and cost.profile.residual_worst < 0.02
        assert "sglang" in cost.profile.versions
        assert len(cost.profile.verify) == 18
        cost_file.write(cost, tmp_path / "cost.yaml")
        assert cost_file.read(tmp_path / "cost.yaml") == cost
        assert (tmp_path / "cost.yaml").stat().st_size < 8000
        assert "200" in profile.table(cost)

    def test_ends_of_answers_and_rare_shapes_do_not_count(self):
        ending = trace_round(4, 3, seconds=9.0)
        ending["verified"][0] = 2
        fewer = [trace_round(3, 3, seconds=9.0)] * 9  # a batch size that was not asked for
        rare = [trace_round(2, 15, seconds=9.0)] * (profile.LEAST_ROUNDS - 1)
        cost = profile.fit(HEADER, [*self.rounds(), ending, *fewer, *rare], (1, 2, 4))
        assert max(point[3] for point in cost.profile.verify) < 0.1

    def test_too_little_is_an_error(self):
        with pytest.raises(profile.ProfileError, match=r"too few rounds .* of a verify"):
            profile.fit(HEADER, [trace_round()] * 9, (2,))


def test_the_grid_is_bounded():
    cells = profile.grid([1, 4, 16], longest=24, most_rows=100, contexts=[128, 768])
    assert all(c.batch * (c.length + 1) <= 100 for c in cells)
    assert {c.length for c in cells if c.batch == 1} == {0, 1, 2, 3, 5, 7, 11, 15, 23, 24}
    assert {c.batch for c in cells if c.context == 768} == {1, 4}
    assert profile.grid([64], longest=1, most_rows=8, contexts=[1]) == [profile.Cell(64, 0, 1)]
