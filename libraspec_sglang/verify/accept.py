"""Acceptance: walk the draft along the target's own choices.

Lossless by construction. The target chooses a token at every verified row, by argmax or by
sampling from its own distribution, exactly as it would have in plain decoding with that prefix.
A drafted token is kept when the target chose the same one; the first choice that differs is the
bonus, and everything after it is dropped. The drafter's probabilities play no part, so nothing
about the output depends on them. (A drafter that proposes deterministically makes the rejection
rule ``min(1, p/q)`` wrong unless q is taken as a point mass; sampling at each node avoids it.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libraspec_sglang.kernels import accept as device

from .layout import VerifyRows


@dataclass(frozen=True)
class Accepted:
    """Outcome of a verification.

    Attributes:
        tokens: int64 [bs, W], the target's choices; the first ``commit_lens`` of a row are the
            round's output (accepted drafted tokens, then the bonus), the rest is undefined.
        commit_lens: int32 [bs], tokens gained, 1..lens.
        bonus: int64 [bs], the last of them: the next round's anchor.
    """

    tokens: torch.Tensor
    commit_lens: torch.Tensor
    bonus: torch.Tensor


def accept(
    choices: torch.Tensor,
    drafted: torch.Tensor,
    rows: VerifyRows,
    width: int,
    limits: torch.Tensor | None = None,
) -> Accepted:
    """Keep each request's longest drafted prefix that equals the target's choices.

    Args:
        choices: int64 [T], the token the target chose at each verified row.
        drafted: int64 [bs, D], drafted tokens, D >= rows.width - 1.
        rows: layout of the T rows.
        width: W, columns of the output, at least ``rows.width``.
        limits: int64 [bs], drafted tokens that may be kept where more rows were verified than
            decided (a captured graph's fixed rows).
    """
    if rows.width == 1:  # plain decoding
        return Accepted(choices[:, None].repeat(1, width), torch.ones_like(rows.lengths), choices)
    return Accepted(*device.accept(choices, drafted, rows.lengths, width, limits))
