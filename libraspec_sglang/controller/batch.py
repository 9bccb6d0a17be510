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
    """
    values = np.nan_to_num(np.asarray(survival, dtype=np.float64), nan=0.0).clip(0.0, 1.0)
    bs, depth = values.shape
    values = np.minimum.accumulate(values, axis=1)
    if bs == 1:  # one request's survivals are in order as they are
        most = depth if caps is None else min(depth, int(caps[0]))
        gain = np.ones(most + 1)
        gain[1:] += np.cumsum(values[0, :most])
        return _peak(gain, np.arange(1, most + 2), cost, draft_cost).reshape(1)
    usable = values > 0.0
    if caps is not None:
        usable &= np.arange(depth) < np.asarray(caps, dtype=np.int64)[:, None]
    request, _ = np.nonzero(usable)
    flat = values[usable]
    # Stable and by request, then depth: equal survivals keep a request's prefix together.
    order = np.argsort(-flat, kind="stable")
    gain = bs + np.concatenate(([0.0], np.cumsum(flat[order])))
    totals = np.arange(bs, bs + gain.shape[0])
    taken = order[: int(_peak(gain, totals, cost, draft_cost))]
    return np.bincount(request[taken], minlength=bs).astype(np.int64)


def _peak(gain: np.ndarray, totals: np.ndarray, cost: Callable, draft_cost: float) -> np.int64:
    """Index of the best rate; the first of equals."""
    return np.argmax(gain / np.maximum(draft_cost + _costs(cost, totals), 1e-12))


def _costs(cost: Callable, totals: np.ndarray) -> np.ndarray:
    try:
        many = np.asarray(cost(totals), dtype=np.float64)
    except (TypeError, ValueError):
        many = None
    if many is None or many.shape != totals.shape:
        many = np.fromiter((cost(int(n)) for n in totals), dtype=np.float64, count=totals.size)
    return many
