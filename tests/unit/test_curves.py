"""Recent survival curves and what they promise of each width."""

import numpy as np
import pytest

from libraspec_sglang.controller import curves
from libraspec_sglang.controller.curves import Curves


def rates(memory, batch, fixed, verify, draft):
    """Of widths 0..depth, where one request is able to draft, not inside anything predictable."""
    return memory.rates(
        batch=batch,
        members=np.array([1, 0, 0, 0]),
        widths=np.zeros(4, dtype=np.int64),
        varied=np.array([True, False, False, False]),
        fixed=fixed,
        verify=verify,
        draft=draft,
    )


def test_a_request_that_cannot_draft_counts_its_own_token_only():
    """One request of three drafts, surely accepted; a round takes 1 s + 0.1 s a drafted row."""
    memory, sure = Curves(2), np.ones((1, 2))
    for _ in range(20):
        memory.take(["a"], [0], sure, sure, accepted=np.array([0]))
    got = rates(memory, 3, fixed=0.5, verify=np.full(10, 0.5), draft=0.1 * np.arange(10))
    assert got == pytest.approx([3 / 1.0, 4 / 1.4, 5 / 1.5])


def test_rounds_that_verify_nothing_are_paid_as_plain_ones():
    """Half of the drafts are sure, half hopeless, and a row beyond plain decoding doubles it."""
    memory = Curves(2)
    for chance in [np.ones((1, 2)), np.full((1, 2), 1e-6)] * 7:
        memory.take(["a"], [0], chance, chance, accepted=np.array([0]))
    verify, draft = np.array([0.0, 1.0, 2.0, 2.0]), np.array([0.0, 0.0, 0.1, 0.1])
    got = rates(memory, 1, fixed=0.0, verify=verify, draft=draft)
    assert got == pytest.approx([1 / 1.0, 1.5 / 1.6, 2 / 1.6], rel=1e-4)


def test_what_a_narrow_draft_leaves_counts_only_where_rounds_go_on_better():
    """Spans of exactly 5: one round of width 5, three of width 1, half of it taken as true."""
    span = np.array([1.0] * 5 + [0.0] * 3)
    alike = np.stack([np.tile(span, (10, 1))] * 4)
    count = np.array([10, 10, 10, 0])
    assert curves._taken_later(alike, count)[0] == pytest.approx(np.ones(9))

    better = np.stack([np.tile(span, (10, 1)), np.ones((10, 8))] * 2)
    factors = curves._taken_later(better, count)
    assert (factors[2:] == 1.0).all()  # too little known of requests that sample
    factors = factors[0]
    going_on = curves.CONTINUED * (9 / 6 - 1)
    lost, found = 2.0, 6 / 3
    assert factors[1] == pytest.approx(1 + going_on * (found / lost - 1))
    assert factors[3] == pytest.approx(1 + going_on * ((6 / 2) / 4 - 1))
    assert factors[5:] == pytest.approx(1.0)
    assert (curves._taken_later(better, np.array([10, 7, 7, 10])) == 1.0).all()


def test_memory_of_requests_is_bounded():
    memory = Curves(4)
    for i in range(curves.REQUESTS_REMEMBERED + 50):
        memory.take([f"r{i}"], [0], np.array([[0.5, 0.5]]), np.array([[0.5, 0.5]]), np.array([2]))
    assert len(memory._inside) == curves.REQUESTS_REMEMBERED
    assert memory.kinds(["r0", f"r{i}"]) == [0, 1]
