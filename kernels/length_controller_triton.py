"""Triton kernels of :mod:`.length_controller`, which documents and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from .length_controller_reference import INDEX_BITS, LEAST_SECONDS, VALUE_BITS

# Triton turns a float constant into float32 before it meets a tensor, hence powers of two only.
_ONE = tl.constexpr(float(1 << VALUE_BITS))
_INDEX_BITS = tl.constexpr(INDEX_BITS)
_LEAST_SECONDS = tl.constexpr(LEAST_SECONDS)
_NONE = tl.constexpr(2**31 - 1)
_ABOVE_ALL_KEYS = tl.constexpr(2**63 - 1)


@triton.jit
def _merge(top, total, token):
    """One (max, sum of exp(x - max), smallest id of the max) from a vector of them."""
    most = tl.max(top, 0)
    scale = tl.exp(tl.where(top == most, 0.0, top - most))  # also where both are infinite
    return most, tl.sum(total * scale, 0), tl.min(tl.where(top == most, token, _NONE), 0)


@triton.jit
def _probability(total):
    return tl.where(total == total, 1.0 / total, 0.0)  # a NaN logit makes the sum NaN


@triton.jit
def confidences(
    logits, row_stride, width, chunk, ids, chance, part_top, part_total, part_token,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (rows, splits): the online softmax over one chunk of a row.

    Every lane keeps its own (max, sum, id), so the loop has no exchange between lanes and one
    exponential a logit: exp(-|x - max|) rescales either the old sum or the new term.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = split * chunk
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    token = first + lane
    for start in range(first, tl.minimum(first + chunk, width), BLOCK):
        column = start + lane
        inside = column < width
        x = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        scale = tl.exp(tl.where(x == top, 0.0, -tl.abs(x - top)))
        larger = x > top  # never for NaN, nor for an equal logit further on
        total = tl.where(larger, total * scale + 1.0, total + tl.where(inside, scale, 0.0))
        token = tl.where(larger, column, token)
        top = tl.where(larger, x, top)
    most, total, token = _merge(top, total, token)
    if SPLIT:
        place = row * tl.num_programs(1) + split
        tl.store(part_top + place, most)
        tl.store(part_total + place, total)
        tl.store(part_token + place, token)
    else:
        tl.store(ids + row, token.to(tl.int64))
        tl.store(chance + row, _probability(total))


@triton.jit(do_not_specialize=["splits"])
def combine(part_top, part_total, part_token, splits, ids, chance, LANES: tl.constexpr):
    """Grid (rows,): the row's result from those of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    place, inside = row * splits + lane, lane < splits
    _, total, token = _merge(
        tl.load(part_top + place, mask=inside, other=float("-inf")),
        tl.load(part_total + place, mask=inside, other=0.0),
        tl.load(part_token + place, mask=inside, other=_NONE),
    )
    tl.store(ids + row, token.to(tl.int64))
    tl.store(chance + row, _probability(total))


@triton.jit(do_not_specialize=["rows", "steps", "first_length", "max_length"])
def algorithm_one(
    confidence, row_stride, stride, alpha, caps, out, rows, steps, first_length, max_length,
    REQUESTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Grid (bs / REQUESTS,): column i - 1 holds the product and the sum of eps_i while d grows."""
    row = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    present = row < rows
    start = tl.arange(0, LANES)[None, :] + 1
    weight = tl.load(alpha + row, mask=present, other=0.0).to(tl.float64)
    weight = tl.where(weight > 0.0, weight, 0.0)[:, None]
    product = tl.full((REQUESTS, LANES), 1.0, tl.float64)
    total = tl.zeros((REQUESTS, LANES), tl.float64)
    length = tl.zeros((REQUESTS,), tl.int32) + first_length
    for d in range(1, steps + 1):
        place = confidence + row.to(tl.int64) * row_stride + (d - 1) * stride
        q = tl.load(place, mask=present, other=0.0).to(tl.float64)
        q = tl.where(q > 0.0, tl.where(q < 1.0, q, 1.0), 0.0)[:, None]
        inside = start <= d
        product = tl.where(inside, product * q, 1.0)
        total = tl.where(inside, total + product, 0.0)
        worth = total * weight
        worth = tl.where(worth < 1e9, worth, 1e9)  # beyond any length, within int32
        eps = tl.floor(worth).to(tl.int32) + start
        bound = tl.minimum(tl.min(tl.where(inside, eps, _NONE), 1), max_length)
        length = tl.where(length == d, bound, length)  # no d meets it again once it stops
    cap = tl.load(caps + row, mask=present, other=0).to(tl.int32)
    tl.store(out + row, tl.maximum(tl.minimum(length, cap), 0), mask=present)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["rows"])
def batch(
    values, row_stride, stride, base, slope, which, caps, seconds, scratch, out, rows, depth,
    table_depth, BINS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1,). A key is (survival in steps, flat index counted down): distinct, and in the order
    they are taken when sorted downwards. ``scratch`` holds the keys by request, then two buffers
    between which the merging goes back and forth."""
    count = rows * depth
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < depth)
        place = values + row.to(tl.int64) * row_stride + column * stride
        p = tl.load(place, mask=inside, other=0.0).to(tl.float64)
        if BINS > 0:
            p = tl.where(p > 0.0, tl.where(p < 1.0, p, 1.0), 0.0)
            table = tl.load(which + row, mask=row < rows, other=0.0).to(tl.int32)
            cell = (table * table_depth + column) * BINS
            cell += tl.minimum((p * BINS).to(tl.int32), BINS - 1)
            add = tl.load(base + cell, mask=inside, other=0.0).to(tl.float64)
            p = add + tl.load(slope + cell, mask=inside, other=0.0).to(tl.float64) * p
            p = tl.cumprod(p, 1)
        cap = tl.load(caps + row, mask=row < rows, other=0)
        p = tl.where((p > 0.0) & (column < cap), p, 0.0)
        steps = (tl.where(p < 1.0, p, 1.0) * _ONE).to(tl.int64)
        steps = tl.where(p > 0.0, tl.maximum(steps, 1), 0)
        steps = tl.associative_scan(steps, 1, _smaller)
        index = row * depth + column
        tl.store(scratch + index, (steps << _INDEX_BITS) | (count - 1 - index), mask=inside)
    tl.debug_barrier()

    lane = tl.arange(0, BLOCK)
    source = tl.full((), 0, tl.int32)
    target = tl.full((), 1, tl.int32)
    run = tl.full((), 0, tl.int32) + depth  # length of the sorted runs
    probe = tl.full((), COLUMNS, tl.int32)  # power of two, at least a run
    while run < count:
        for first in range(0, count, BLOCK):
            index = first + lane
            inside = index < count
            key = tl.load(scratch + source * count + index, mask=inside, other=0)
            own = index // run
            other = (own ^ 1) * run
            size = tl.minimum(run, count - other)  # below 1 where a run has no neighbour
            larger = tl.zeros((BLOCK,), tl.int32)  # keys in the neighbour that go first
            jump = probe
            while jump > 0:
                tried = larger + jump
                reach = inside & (tried <= size)
                there = tl.load(scratch + source * count + other + tried - 1, mask=reach, other=0)
                larger = tl.where(reach & (there > key), tried, larger)
                jump = jump // 2
            place = index - (own & 1) * run + larger
            tl.store(scratch + target * count + place, key, mask=inside)
        tl.debug_barrier()
        source = target
        target = 3 - target
        run = run * 2
        probe = probe * 2

    least = tl.full((), _LEAST_SECONDS, tl.float64)
    rate = rows / tl.maximum(tl.load(seconds).to(tl.float64), least)
    last = tl.full((), _ABOVE_ALL_KEYS, tl.int64)  # the smallest key taken
    taken = tl.full((), 0, tl.int64)  # survival in all keys before the block, in steps
    for first in range(0, count, BLOCK):
        index = first + lane
        inside = index < count
        key = tl.load(scratch + source * count + index, mask=inside, other=0)
        steps = key >> _INDEX_BITS
        tokens = rows + (taken + tl.cumsum(steps, 0)).to(tl.float64) / _ONE
        spent = tl.load(seconds + index + 1, mask=inside, other=1.0).to(tl.float64)
        rates = tl.where(steps > 0, tokens / tl.maximum(spent, least), 0.0)
        best, at = tl.max(rates, 0, return_indices=True)
        last = tl.where(best > rate, tl.sum(tl.where(lane == at, key, 0), 0), last)
        rate = tl.maximum(rate, best)
        taken += tl.sum(steps, 0)

    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < depth)
        key = tl.load(scratch + row * depth + column, mask=inside, other=0)
        length = tl.sum((key >= last).to(tl.int32), 1)
        row = first + tl.arange(0, ROWS)
        tl.store(out + row, length, mask=row < rows)
