"""Hidden states reach the drafter's cache once each, in order, and before anyone reads it."""

import pytest
import torch

pytest.importorskip("sglang")
from libraspec_sglang.engine.draft_context import MOST_ROWS, DraftContext


class Cache:
    def __init__(self):
        self.calls = []

    def write(self, *, target_hidden, cache_loc, positions):
        assert target_hidden.shape == (len(cache_loc), 3)
        assert len(positions) == len(cache_loc)
        self.calls.append(cache_loc.tolist())


def add(context, requests, slots, wait, padding=0):
    slots = torch.tensor(slots)
    context.add(requests, torch.ones(len(slots) + padding, 3), slots, slots + 100, wait=wait)


def test_a_drafted_round_is_written_at_once():
    cache = Cache()
    context = DraftContext(cache.write)
    add(context, ["a"], [1, 2], wait=False)
    assert cache.calls == [[1, 2]]
    context.flush()
    assert cache.calls == [[1, 2]]


def test_plain_rounds_wait_for_the_next_reader():
    cache = Cache()
    context = DraftContext(cache.write)
    for slot in (1, 2, 3):
        add(context, ["a"], [slot], wait=True, padding=1)
    assert cache.calls == []
    add(context, ["a"], [4], wait=False)
    assert cache.calls == [[1, 2, 3], [4]]


def test_another_batch_does_not_share_a_write():
    """A request that left may have given its slots to one that came."""
    cache = Cache()
    context = DraftContext(cache.write)
    add(context, ["a", "b"], [1, 2], wait=True)
    add(context, ["b"], [1], wait=True)
    assert cache.calls == [[1, 2]]
    context.flush()
    assert cache.calls == [[1, 2], [1]]


def test_what_waits_is_bounded():
    cache, slots = Cache(), list(range(2 * MOST_ROWS))
    context = DraftContext(cache.write)
    for first in slots[::2]:
        add(context, ["a", "b"], [first, first + 1], wait=True)
    assert cache.calls == [slots[:MOST_ROWS], slots[MOST_ROWS:]]
