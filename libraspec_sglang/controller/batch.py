"""Lengths for a whole batch at once: spend verified rows where they are likeliest to pay.

In serving, a verified row costs the batch, not its request. For a fixed number of rows the best
split takes the globally largest survivals, because a request's survivals never increase with
depth; the number of rows is then chosen where expected tokens per second peak:

    R = (sum_r 1 + E[tau_r(d_r)]) / (T_draft + T_verify(sum_r 1 + d_r))

With one request and constant cost per row this is the criterion of arXiv 2608.08721, theorem 3.5:
extend while the next token's survival exceeds c * E[tau] / T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .compiled import compiled


def allocate(
    survival: np.ndarray,
    cost: Callable[[int], float],
    caps: Sequence[int] | None = None,
    draft_cost: float = 0.0,
) -> np.ndarray:
    """Lengths that maximise expected tokens per second.

    Args:
        survival: [bs, D] probability that drafted token d of request r is accepted *and all
            before it are*; anything above its predecessor is cut down to it, NaN is 0.
        cost: seconds of a target forward over so many rows in total; each request's own row
            counts. May also accept an integer array (it is then called once).
        caps: [bs] largest length per request, or None.
        draft_cost: seconds spent before the forward whatever is decided.

    Returns:
        int64 [bs] lengths, each in 0..min(D, cap); ties go to fewer rows.

    Raises:
        ValueError: caps of another number or kind.
    """
    values = np.ascontiguousarray(survival, dtype=np.float64)
    bs, depth = values.shape
    limits = np.full(bs, depth) if caps is None else np.asarray(caps).clip(0, depth)
    if limits.shape != (bs,) or limits.dtype.kind not in "iu":
        raise ValueError(f"caps must be {bs} integers, got {caps!r}")
    limits = np.ascontiguousarray(limits, dtype=np.int64)
    totals = np.arange(bs, bs + int(limits.sum()) + 1)
    return best_lengths(values, limits, draft_cost + _costs(cost, totals))


@compiled
def best_lengths(survival, limits, seconds):
    """:func:`allocate` in one call.

    survival: float64 [bs, D]; limits: int64 [bs] within 0..D; seconds: float64 [sum(limits) + 1],
    of a whole round by tokens verified beyond one a request. Returns int64 [bs].
    """
    bs = survival.shape[0]
    most = limits.sum()
    value, owner = np.empty(most), np.empty(most, dtype=np.int64)
    usable = 0
    for request in range(bs):
        last = 1.0
        for position in range(limits[request]):
            p = survival[request, position]
            if not p > 0.0:  # NaN too
                break
            last = min(last, p)
            value[usable], owner[usable] = -last, request
            usable += 1
    # Stable and by request, then depth: equal survivals keep a request's prefix together.
    order = np.argsort(value[:usable], kind="mergesort")
    tokens = float(bs)
    best, taken = tokens / max(seconds[0], 1e-12), 0
    for rows in range(1, usable + 1):
        tokens -= value[order[rows - 1]]
        rate = tokens / max(seconds[rows], 1e-12)
        if rate > best:
            best, taken = rate, rows
    lengths = np.zeros(bs, dtype=np.int64)
    for index in order[:taken]:
        lengths[owner[index]] += 1
    return lengths


def _costs(cost: Callable, totals: np.ndarray) -> np.ndarray:
    try:
        many = np.asarray(cost(totals), dtype=np.float64)
    except (TypeError, ValueError):
        many = None
    if many is None or many.shape != totals.shape:
        many = np.fromiter((cost(int(n)) for n in totals), dtype=np.float64, count=totals.size)
    return many
