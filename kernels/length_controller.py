"""Length control on the device: confidences, Algorithm 1, and batch-wide lengths by cost.

Three operations, each a Triton kernel (:mod:`.length_controller_triton`) on CUDA tensors and under
``TRITON_INTERPRET=1``, and its torch twin (:mod:`.length_controller_reference`) on CPU tensors.
None of them looks at a value on the host or lets data decide a launch, so all can be captured in a
CUDA graph; with ``out=`` they write where the graph's reader expects.

================  ====================  ============================================================
operation         launches              bytes moved
================  ====================  ============================================================
confidences       1, or 2 (few rows)    rows * (V * itemsize + 12), plus rows * splits * 24
lengths_          1                     bs * (D * itemsize + alpha + cap + 4)
  algorithm_one
lengths_batch     1                     bs * D * (itemsize + 24 + 16 * levels) + seconds; all but
                                        the input stays in cache; levels = ceil(log2(bs))
================  ====================  ============================================================
"""

from __future__ import annotations

import torch
import triton

from . import length_controller_reference as reference
from . import length_controller_triton as kernels

INTERPRETED = triton.knobs.runtime.interpret
LARGEST_BATCH = 1 << reference.INDEX_BITS
"""Most values (bs * D) of one :func:`lengths_batch`."""
DEEPEST = 1024
"""Most values of one request in it."""
VOCABULARY_BLOCK, VOCABULARY_WARPS = 4096, 8
PROGRAMS_WANTED = 512
"""Programs that fill a device: rows are split until there are about so many."""
REQUESTS = 8
"""Requests one program of Algorithm 1 follows."""
BATCH_BLOCK, BATCH_WARPS = 1024, 16


def on_device(device: torch.device) -> bool:
    """Whether the kernels decide there, rather than the host (or the twins)."""
    return INTERPRETED or device.type == "cuda"


def confidences(
    logits: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafted tokens and the probabilities the drafter gives them (q_k; arXiv 2608.08721, 3.1).

    Equal logits go to the smallest id. A row with a NaN has probability 0 (no confidence) and the
    id of its largest other logit (0 if all are NaN). A row whose largest logit is infinite is the
    limit of finite ones: with n logits of +inf, or n = V of -inf, the first of them with 1 / n.

    Args:
        logits: bfloat16, float16 or float32 [rows, V]; any row stride, neighbours in V adjacent.
        out: (int64 [rows], float32 [rows]), contiguous, to write to.

    Returns:
        (token ids int64 [rows], probabilities float32 [rows]).

    Raises:
        TypeError: another dtype. ValueError: another shape or an unfit ``out``.
    """
    _check("logits", logits, 2, (torch.bfloat16, torch.float16, torch.float32))
    rows, width = logits.shape
    if width == 0 or (width > 1 and logits.stride(1) != 1):
        raise ValueError("logits need at least one column, and columns next to each other")
    ids, chance = (None, None) if out is None else out
    ids = _output(ids, rows, torch.int64, logits)
    chance = _output(chance, rows, torch.float32, logits)
    if not on_device(logits.device):
        for target, result in zip((ids, chance), reference.confidences(logits), strict=True):
            target.copy_(result)
        return ids, chance
    if rows == 0:
        return ids, chance
    blocks = triton.cdiv(width, VOCABULARY_BLOCK)
    splits = min(blocks, triton.cdiv(PROGRAMS_WANTED, rows))
    chunk = triton.cdiv(blocks, splits) * VOCABULARY_BLOCK
    splits = triton.cdiv(width, chunk)  # none of them empty
    parts = torch.empty((2, rows, splits), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    kernels.confidences[(rows, splits)](
        logits, logits.stride(0), width, chunk, ids, chance, parts[0], parts[1], tokens,
        BLOCK=VOCABULARY_BLOCK, SPLIT=splits > 1, num_warps=VOCABULARY_WARPS,
    )  # fmt: skip
    if splits > 1:
        kernels.combine[(rows,)](
            parts[0], parts[1], tokens, splits, ids, chance,
            LANES=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
    return ids, chance


def lengths_algorithm_one(
    confidence: torch.Tensor,
    alpha: torch.Tensor,
    caps: torch.Tensor,
    *,
    block_size: int,
    max_length: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Algorithm 1 of arXiv 2608.08721 for a batch, as far as the given confidences reach.

    From d = min(block_size, max_length), follow d -> min_i eps_i (theorem 3.4) while it grows.
    float64 in the order of the definition: each eps_i sums its products from i upwards, and i is
    added after the floor. A result above D means "draft further".

    Args:
        confidence: float32 or float64 [bs, D]; NaN counts as 0, values are clamped to [0, 1].
        alpha: float32 or float64 [bs], positive and finite (anything not above 0 counts as 0: the
            length rolls back to 1).
        caps: int32 or int64 [bs], the most each request may verify; applied to the result.
        block_size: n >= 1.
        max_length: d_max >= 1.
        out: int32 [bs], contiguous, to write to.

    Returns:
        int32 [bs] lengths in 0..min(max_length, cap).

    Raises:
        TypeError: another dtype. ValueError: another shape, or a number below 1.
    """
    _check("confidence", confidence, 2, (torch.float32, torch.float64))
    rows, width = confidence.shape
    _check("alpha", alpha, 1, (torch.float32, torch.float64), rows)
    _check("caps", caps, 1, (torch.int32, torch.int64), rows)
    if block_size < 1 or max_length < 1:
        raise ValueError(f"block_size {block_size} and max_length {max_length} must be at least 1")
    out = _output(out, rows, torch.int32, confidence)
    if not on_device(confidence.device):
        lengths = reference.lengths_algorithm_one(confidence, alpha, caps, block_size, max_length)
        return out.copy_(lengths)
    if rows:
        kernels.algorithm_one[(triton.cdiv(rows, REQUESTS),)](
            confidence, *confidence.stride(), alpha.contiguous(), caps.contiguous(), out, rows,
            min(width, max_length - 1), min(block_size, max_length), max_length,
            REQUESTS=REQUESTS, LANES=triton.next_power_of_2(max(width, 1)), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def lengths_batch(
    values: torch.Tensor,
    caps: torch.Tensor,
    seconds: torch.Tensor,
    *,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lengths that maximise (bs + sum of the verified tokens' survivals) / seconds.

    The generalisation of arXiv 2608.08721, theorem 3.5, to a batch and any cost curve. Survivals
    never increase with depth, so for each number of rows the best choice is the globally largest
    survivals; the number is where the ratio first peaks (ties go to fewer rows). Equal survivals
    are taken by request, then depth.

    Survivals count in steps of 2**-48 (a positive one at least one step; closer ones are equal), so
    sums do not depend on their order and the result is the same on every device.

    One program sorts: requests are sorted already, so ceil(log2(bs)) rounds of merging pairs of
    runs remain, each placing every value by a binary search in the neighbouring run. Work is
    O(bs D log(bs) log(bs D)); scratch is 24 bytes a value, in global memory but small enough to
    stay in cache (shared memory serves the scans only).

    Args:
        values: float32 or float64 [bs, D], D <= 1024, bs * D <= 16384: the probability that token
            d of a request *and all before it* are accepted. What exceeds its predecessor (or 1) is
            cut down to it; a NaN or anything not above 0 ends the request.
        caps: int32 or int64 [bs], largest length per request.
        seconds: float32 or float64 [at least bs * D + 1], of a whole round by the rows verified
            beyond one a request; below 1e-12 counts as 1e-12. Must not be NaN.
        tables: (base, slope, which): base and slope float32 or float64 [C, at least D, BINS],
            contiguous; which float64 [bs], each request's table 0..C-1. With them ``values`` are
            confidences, and p = base + slope * q by position and confidence bin (BINS equal bins
            over 0..1, NaN counts as 0); survivals are the products of p.
        out: int32 [bs], contiguous, to write to.

    Returns:
        int32 [bs] lengths in 0..min(D, cap).

    Raises:
        TypeError: another dtype. ValueError: another shape, or too many values.
    """
    floats = (torch.float32, torch.float64)
    _check("values", values, 2, floats)
    rows, depth = values.shape
    _check("caps", caps, 1, (torch.int32, torch.int64), rows)
    _check("seconds", seconds, 1, floats)
    if rows * depth > LARGEST_BATCH or depth > DEEPEST:
        raise ValueError(f"{rows} x {depth} values, at most {LARGEST_BATCH} of {DEEPEST} each fit")
    if seconds.shape[0] < rows * depth + 1:
        raise ValueError(f"seconds has {seconds.shape[0]} entries, needs {rows * depth + 1}")
    if tables is not None:
        for name, table in zip(("base", "slope"), tables, strict=False):
            _check(name, table, 3, floats)
            if table.shape[1] < depth or table.shape != tables[0].shape:
                raise ValueError(f"{name} must be [tables, at least {depth}, bins], like the other")
            if not table.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
        _check("which", tables[2], 1, (torch.float64,), rows)
    out = _output(out, rows, torch.int32, values)
    if rows * depth == 0:
        return out.zero_()
    if not on_device(values.device):
        return out.copy_(reference.lengths_batch(values, caps, seconds, tables))
    scratch = torch.empty(3 * rows * depth, dtype=torch.int64, device=values.device)
    base, slope, which = tables or (values, values, values)  # not read without tables
    kernels.batch[(1,)](
        values, *values.stride(), base, slope, which.contiguous(), caps.contiguous(),
        seconds.contiguous(), scratch, out, rows, depth, tables[0].shape[1] if tables else 0,
        BINS=tables[0].shape[2] if tables else 0, COLUMNS=triton.next_power_of_2(depth),
        ROWS=max(1, BATCH_BLOCK // triton.next_power_of_2(depth)), BLOCK=BATCH_BLOCK,
        num_warps=BATCH_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _check(
    name: str, tensor: torch.Tensor, dims: int, dtypes: tuple, rows: int | None = None
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}, must be one of {dtypes}")
    if tensor.dim() != dims or (rows is not None and tensor.shape[0] != rows):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}")


def _output(
    given: torch.Tensor | None, rows: int, dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    if given is None:
        return torch.empty(rows, dtype=dtype, device=like.device)
    if given.shape != (rows,) or given.dtype != dtype or not given.is_contiguous():
        raise ValueError(f"out must be contiguous {dtype} [{rows}]")
    return given
