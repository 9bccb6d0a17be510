"""Torch twins of :mod:`.length_controller`: the same results on any device, no host sync.

Contracts (shapes, dtypes, edge cases) are those of the functions of the same name there, which
check arguments and choose between the two.
"""

from __future__ import annotations

import torch

VALUE_BITS = 48
"""Survivals count in steps of 2**-48: with INDEX_BITS a key fills 63 bits, and so does a sum."""
INDEX_BITS = 14
LEAST_SECONDS = 1e-12


def confidences(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Most probable tokens int64 [rows] and their probabilities float32 [rows]."""
    x = logits.to(torch.float32)
    top = torch.where(x.isnan(), -torch.inf, x).amax(dim=1, keepdim=True)
    total = torch.where(x == top, 0.0, x - top).exp().sum(dim=1)
    ids = (x == top).to(torch.int8).argmax(dim=1)  # the first, and 0 where all are NaN
    return ids, torch.where(total.isnan(), 0.0, 1.0 / total)


def lengths_algorithm_one(
    confidence: torch.Tensor,
    alpha: torch.Tensor,
    caps: torch.Tensor,
    block_size: int,
    max_length: int,
) -> torch.Tensor:
    """Algorithm 1 of arXiv 2608.08721, int32 [bs]: D steps over [bs, D] tensors.

    At step d, column i - 1 holds prod_{k=i..d} q_k and sum_{j=i..d} prod_{k=i..j} q_k.
    """
    rows, width = confidence.shape
    q = confidence.to(torch.float64).nan_to_num(nan=0.0).clamp(0.0, 1.0)
    weight = alpha.to(torch.float64)
    weight = torch.where(weight > 0, weight, 0.0)[:, None]
    product, total = torch.ones_like(q), torch.zeros_like(q)
    start = torch.arange(1, width + 1, device=q.device)
    length = torch.full((rows,), min(block_size, max_length), device=q.device)
    for d in range(1, min(width, max_length - 1) + 1):
        product[:, :d] *= q[:, d - 1 : d]
        total[:, :d] += product[:, :d]
        worth = (total[:, :d] * weight).clamp(max=1e9)
        bound = (worth.floor().to(torch.int64) + start[:d]).amin(dim=1).clamp(max=max_length)
        length = torch.where(length == d, bound, length)  # no d meets it again once it stops
    return torch.minimum(length, caps).clamp(min=0).to(torch.int32)


def lengths_batch(
    values: torch.Tensor,
    caps: torch.Tensor,
    seconds: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Lengths of the best (bs + survivals) / seconds, int32 [bs], by one sort and one scan."""
    rows, depth = values.shape
    position = torch.arange(depth, device=values.device)
    survival = values.to(torch.float64)
    if tables is not None:
        q = survival.nan_to_num(nan=0.0).clamp(0.0, 1.0)
        base, slope = (table.to(torch.float64) for table in tables[:2])
        bins, which = base.shape[2], tables[2].to(torch.int64)[:, None]
        place = (q * bins).to(torch.int64).clamp(max=bins - 1)
        cell = which, position, place
        survival = (base[cell] + slope[cell] * q).cumprod(dim=1)
    usable = (survival > 0) & (position < caps[:, None])
    steps = (survival.clamp(max=1.0) * 2**VALUE_BITS).to(torch.int64).clamp(min=1)
    steps = torch.where(usable, steps, 0).cummin(dim=1).values
    count = rows * depth
    # Distinct keys, larger ones first: by survival, then request, then depth.
    index = torch.arange(count - 1, -1, -1, device=values.device).view(rows, depth)
    key = (steps << INDEX_BITS) | index
    order = key.flatten().sort(descending=True).values
    gain = order >> INDEX_BITS
    tokens = rows + gain.cumsum(dim=0).to(torch.float64) / 2**VALUE_BITS
    rate = torch.cat([tokens.new_full((1,), float(rows)), tokens])
    rate = rate / seconds[: count + 1].to(torch.float64).clamp(min=LEAST_SECONDS)
    rate[1:].masked_fill_(gain == 0, 0.0)
    # Entry 0 takes nothing; argmax returns the first of equal rates.
    last = torch.cat([order.new_full((1,), torch.iinfo(torch.int64).max), order])[rate.argmax()]
    return (key >= last).sum(dim=1, dtype=torch.int32)
