"""Lengths for a whole batch at once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libraspec_sglang.controller import criterion
from libraspec_sglang.controller.batch import allocate

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
