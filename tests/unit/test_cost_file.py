"""Cost files: the model, the format and its messages, and what ships."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libraspec_sglang.controller import cost_file
from libraspec_sglang.controller.batch import allocate
from libraspec_sglang.controller.cost_file import Cost, CostError, Forward

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "cost").glob("*.yaml"))

GOOD = """\
version: 1
device: d
target: t
drafter: f
measured: true
how: timed
verify:
  rows: [1, 8, 16]
  seconds: [0.01, 0.01, 0.02]
  per_request: 0.001
draft:
  interpolation: step
  rows: [8]
  seconds: [0.002]
"""


def written(tmp_path, text):
    file = tmp_path / "cost.yaml"
    file.write_text(text)
    return file


class TestForward:
    linear = Forward(rows=[1, 8, 16], seconds=[1.0, 1.0, 3.0])
    step = Forward(interpolation="step", rows=[8, 16, 32], seconds=[1.0, 2.0, 4.0])

    def test_linear_between_and_beyond(self):
        assert self.linear(1, np.array([1, 4, 12, 16, 20])).tolist() == [1, 1, 2, 3, 4]

    def test_steps_are_padded_up(self):
        assert self.step(1, np.array([1, 8, 9, 16, 17, 32])).tolist() == [1, 1, 2, 2, 4, 4]
        assert self.step(1, 40) == pytest.approx(5.0)

    def test_requests_and_context_cost(self):
        forward = Forward(rows=[1], seconds=[1.0], per_request=0.5, per_context_token=0.01)
        assert forward(4, 99, 100) == pytest.approx(1 + 2 + 1)
        assert forward(4, 99, np.array([0, 100])).tolist() == [3.0, 4.0]

    @given(
        st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 5)), min_size=1, max_size=6),
        st.sampled_from(["linear", "step"]),
    )
    def test_it_passes_through_its_table_and_goes_on_beyond_it(self, points, interpolation):
        table = dict(points)
        rows = sorted(table)
        seconds = sorted(table.values())
        forward = Forward(interpolation=interpolation, rows=rows, seconds=seconds)
        assert forward(1, np.array(rows)).tolist() == pytest.approx(seconds)
        assert forward(1, rows[-1] + 100) >= seconds[-1] * (1 - 1e-12)
        assert forward(1, 1) == pytest.approx(seconds[0])

    def test_allocate_uses_it_and_stops_at_a_step(self):
        cost = Cost(
            version=1, device="d", target="t", drafter="f", measured=False, how="made up",
            verify=Forward(interpolation="step", rows=[4, 64], seconds=[1.0, 9.0]),
            draft=Forward(rows=[1], seconds=[0.1]),
        )  # fmt: skip
        lengths = allocate(np.full((1, 9), 0.99), lambda n: cost(1, n))
        assert lengths.tolist() == [3]  # with the request's own row, up to the first tier


def test_round_trip(tmp_path):
    cost = cost_file.read(written(tmp_path, GOOD))
    assert (cost.verify(3, 12), cost.draft(3, 5)) == (pytest.approx(0.018), pytest.approx(0.002))
    copy = tmp_path / "copy.yaml"
    cost_file.write(cost, copy)
    assert cost_file.read(copy) == cost
    assert copy.read_text().startswith("version: 1\n")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("", "x: [", ":15: not YAML"),
        (GOOD, "", ":1: not a cost file"),
        (GOOD, "- 1\n", ":1: not a cost file"),
        ("version: 1", "version: 2", ":1: cost file version 2 is newer"),
        ("version: 1", "version: one", ":1: version"),
        ("device: d\n", "", ":1: device: Field required"),
        ("how: timed", "how: ''", ":6: how"),
        ("how: timed", "how: timed\ncolour: red", ":7: colour: Extra inputs"),
        ("measured: true", "measured: perhaps", ":5: measured"),
        ("[0.01, 0.01, 0.02]", "[0.01, 0.01]", ":7: verify: 3 rows but 2 seconds"),
        ("[0.01, 0.01, 0.02]", "[0.01, -1, 0.02]", r":9: verify.seconds.1: .*greater than"),
        ("[0.01, 0.01, 0.02]", "[0.01, .nan, 0.02]", ":9: verify.seconds.1: .*finite"),
        ("rows: [1, 8, 16]", "rows: [1, 16, 8]", ":7: verify: rows must increase"),
        ("[0.01, 0.01, 0.02]", "[0.02, 0.01, 0.02]", ":7: verify: seconds must not fall"),
        ("rows: [8]", "rows: []", ":13: draft.rows"),
        ("interpolation: step", "interpolation: cubic", ":12: draft.interpolation"),
        ("how: timed", "how: timed\n5: x", ":1: not a cost file"),
        ("device: d", "device: 2024-13-45", ": not a cost file"),
        ("device: d", "device: !!int 'x'", ": not a cost file"),
        ("device: d", f"device: {'[' * 5000}", ": not a cost file"),
        ("[0.01, 0.01, 0.02]", "[0.01, 1.0e+300, 0.02]", ":9: verify.seconds.1"),
        ("per_request: 0.001", "per_request: -1", ":10: verify.per_request"),
    ],
)
def test_faults_name_file_and_line(tmp_path, old, new, words):
    file = written(tmp_path, GOOD.replace(old, new) if old else GOOD + new)
    with pytest.raises(CostError, match="cost.yaml" + words):
        cost_file.read(file)


def test_missing_file(tmp_path):
    with pytest.raises(CostError, match=r"none.yaml: No such file"):
        cost_file.read(tmp_path / "none.yaml")


class TestShipped:
    def test_three_devices(self):
        assert [file.stem for file in SHIPPED] == ["a100", "b200", "h100"]

    @pytest.mark.parametrize(
        ("name", "bandwidth", "flops"),
        [("a100", 2.039e12, 312e12), ("h100", 3.35e12, 989e12), ("b200", 8.0e12, 2250e12)],
    )
    def test_figures_follow_from_the_derivation_they_state(self, name, bandwidth, flops):
        cost = cost_file.read(next(f for f in SHIPPED if f.stem == name))
        assert not cost.measured and "Not measured" in cost.how
        assert f"{bandwidth / 1e12:g}" in cost.how and f"{flops / 1e12:g} TFLOP" in cost.how
        for forward, weights, kv in (
            (cost.verify, 7.57e9, 147456),
            (cost.draft, 1.59e9, 20480),
        ):
            for rows in (1, 100, 500, 5000):
                roof = max(2 * weights / (0.8 * bandwidth), 2 * weights * rows / (0.6 * flops))
                assert forward(1, rows) == pytest.approx(roof + 1e-6 * rows, rel=0.01)
            assert forward.per_context_token == pytest.approx(kv / (0.8 * bandwidth), rel=0.01)
