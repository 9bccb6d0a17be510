"""Triton kernel of :mod:`.accept`, which documents and launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["width", "depth"])
def accept(
    choices, drafted, row_stride, stride, lens, limits, tokens, gained, bonus, width, depth,
    LIMITED: tl.constexpr, LANES: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Grid (bs,): one request, a lane for each of its columns."""
    own = tl.program_id(0)
    first = tl.full((), 0, tl.int64)  # rows of the requests before
    for start in range(0, own, REQUESTS):
        other = start + tl.arange(0, REQUESTS)
        first += tl.sum(tl.load(lens + other, mask=other < own, other=0).to(tl.int64), 0)
    size = tl.load(lens + own)
    column = tl.arange(0, LANES)
    token = tl.load(choices + first + column, mask=column < size, other=-1)
    kept = tl.minimum(size - 1, depth).to(tl.int64)
    if LIMITED:
        kept = tl.minimum(kept, tl.load(limits + own))
    place = drafted + own.to(tl.int64) * row_stride + column * stride
    draft = tl.load(place, mask=column < kept, other=-2)
    run = tl.min(tl.where(token == draft, LANES, column), 0)  # the first that differs
    tl.store(tokens + own.to(tl.int64) * width + column, token, mask=column < width)
    tl.store(gained + own, run + 1)
    tl.store(bonus + own, tl.sum(tl.where(column == run, token, 0), 0))
