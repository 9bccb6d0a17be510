"""LibraSpec's criterion and Algorithm 1 (arXiv 2608.08721, sections 3.2 to 3.4).

Symbols: q_k is the drafter's confidence in its k-th token (the probability it gave the token it
drafted), used for the chance that token k is accepted given that 1..k-1 were; alpha = T / (tau c)
weighs an expected accepted token against the cost of a verified one.

Positions are 1-based in the text and 0-based in tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from .compiled import compiled

FAR = 1e9
"""Beyond any length, and far below what an integer holds."""


def expected_accepted(p: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """E[tau_d] for d = 1..D: expected accepted tokens when d tokens are verified.

    ``E[tau_d] = sum_{j<=d} prod_{k<=j} p_k`` (section 3.1).

    Args:
        p: [D] or [bs, D] acceptance probabilities, each given that all before were accepted.

    Returns:
        float64, same shape: entry d-1 is E[tau_d].
    """
    p = torch.as_tensor(p, dtype=torch.float64)
    return torch.cumprod(p, dim=-1).cumsum(dim=-1)


def speedup(
    p: Sequence[float] | torch.Tensor,
    verify: Sequence[float] | torch.Tensor,
    *,
    plain: float = 1.0,
    draft: float = 0.0,
) -> torch.Tensor:
    """eta_d = E[tau_d] L / (T_draft + T_d) for d = 1..D (section 3.1).

    The bonus token is left out, as in the paper; ``batch.allocate`` counts it.

    Args:
        p: [D] acceptance probabilities, each given that all before were accepted.
        verify: [D] T_d, seconds of verifying d tokens.
        plain: L, seconds of a plain decoding step.
        draft: T_draft, seconds of drafting.

    Returns:
        float64 [D].
    """
    seconds = draft + torch.as_tensor(verify, dtype=torch.float64)
    return expected_accepted(p) * plain / seconds


def adjustment_pays(
    p: Sequence[float], verify: Sequence[float], length: int, other: int, draft: float = 0.0
) -> bool:
    """Whether verifying ``other`` tokens instead of ``length`` raises the speedup (theorem 3.2).

    Longer: the added tokens must bring more per second than the length so far. Shorter: the
    removed ones must bring less than the length with them.

    Args:
        p, verify, draft: as of :func:`speedup`; times rise with length.
        length, other: 1..D.
    """
    expected = expected_accepted(p).tolist()
    gain = expected[other - 1] - expected[length - 1]
    price = verify[other - 1] - verify[length - 1]
    # Cross-multiplied: gain / price against expected / seconds, whichever sign the change has.
    return gain * (draft + verify[length - 1]) > expected[length - 1] * price


def best_length(p: Sequence[float], verify: Sequence[float], draft: float = 0.0) -> int:
    """The length 1..D of highest speedup, by trying all; the shortest of equals."""
    return int(speedup(p, verify, draft=draft).argmax()) + 1


def suffix_bounds(confidences: Sequence[float], length: int, alpha: float) -> list[int]:
    """eps_i = floor(alpha * sum_{j=i..d} prod_{k=i..j} q_k) + i for i = 1..d (theorem 3.4).

    The inner double sum is the linear recurrence S_i = q_i (1 + S_{i+1}), S_{d+1} = 0, so one
    reverse pass in float64 gives all of them. The integer i is added after the floor: it must not
    cost the sum its last bits at an integer boundary.
    """
    bounds = [0] * length
    tail = 0.0
    for i in range(length, 0, -1):
        tail = confidences[i - 1] * (1.0 + tail)
        bounds[i - 1] = math.floor(alpha * tail) + i
    return bounds


def algorithm_one(
    confidences: Sequence[float], block_size: int, max_length: int, alpha: float
) -> tuple[int, int]:
    """Algorithm 1 for one request: the length to verify and the blocks it took to know it.

    Start from one drafted block, extend while even the weakest suffix earns its cost, and roll
    back at most once. ``B`` is the budget of tokens drafted but not yet asked for; it lives for
    one round. The length never exceeds ``max_length``.

    Args:
        confidences: q_1.. up to at least ``max_length`` tokens.
        block_size: n, tokens one drafting pass adds.
        max_length: d_max.
        alpha: T / (tau c), positive.

    Returns:
        (length d >= 1, blocks drafted >= 1).
    """
    _check(block_size, max_length, alpha)
    if len(confidences) < max_length:
        raise ValueError(f"need {max_length} confidences (max_length), got {len(confidences)}")
    q = [_probability(c) for c in confidences]
    length, budget, blocks = min(block_size, max_length), 0, 1
    while length < max_length:
        bound = min(min(suffix_bounds(q, length, alpha)), max_length)
        if bound <= length:
            return bound, blocks
        budget -= bound - length
        length = bound
        if budget < 0:
            more = -(budget // block_size)
            blocks += more
            budget += more * block_size
    return length, blocks


def first_lengths(
    confidences: torch.Tensor,
    alpha: torch.Tensor | float,
    *,
    block_size: int,
    max_length: int,
) -> torch.Tensor:
    """Algorithm 1 for a batch on the host, as far as the given confidences reach.

    Follows d -> min_i eps_i from d = block_size. A request whose next length lies beyond the
    D tokens drafted so far stays at that wish, so a result above D means "draft further".

    Args:
        confidences: [bs, D], D >= min(block_size, max_length); NaN counts as no confidence,
            values are clamped to [0, 1].
        alpha: scalar or [bs].
        block_size: n.
        max_length: d_max.

    Returns:
        int64 [bs] lengths in 1..max_length.
    """
    q = confidences.cpu().to(torch.float64).numpy()
    weights = np.broadcast_to(np.asarray(alpha, dtype=np.float64), len(q))
    _check(block_size, max_length, weights.min(initial=math.inf))
    return torch.from_numpy(_first_lengths(q, weights, min(block_size, max_length), max_length))


@compiled
def _first_lengths(confidences, alpha, start, max_length):
    """Sums are taken as they are defined, from i upwards, as the kernel takes them."""
    requests, width = confidences.shape
    lengths = np.empty(requests, dtype=np.int64)
    q = np.empty(width)
    for request in range(requests):
        for k in range(width):
            value = confidences[request, k]
            q[k] = min(value, 1.0) if value > 0.0 else 0.0  # NaN too
        length = start
        while length < max_length and length <= width:
            bound = max_length
            for i in range(length):
                product, total = 1.0, 0.0
                for j in range(i, length):
                    product *= q[j]
                    total += product
                worth = min(alpha[request] * total, FAR)
                bound = min(bound, math.floor(worth) + i + 1)
            grows = bound > length
            length = bound
            if not grows:
                break
        lengths[request] = length
    return lengths


def _probability(value: float) -> float:
    return 0.0 if math.isnan(value) else min(max(float(value), 0.0), 1.0)


def _check(block_size: int, max_length: int, alpha: float) -> None:
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
