"""Length policies behind one small protocol, chosen by ``--libraspec-policy``.

A policy says how many tokens the first drafting pass should bring and, given the drafter's
confidences, how many of them (or how many more) each request verifies. Zero is a length: the
round is then a plain decoding step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from . import criterion


class Policy(Protocol):
    """Decides verified lengths."""

    name: str
    first_draft: int
    """Tokens the first drafting pass proposes; 0 skips drafting."""
    needs_confidence: bool
    """Whether ``decide`` reads the confidences."""

    def decide(self, confidence: torch.Tensor, alpha: torch.Tensor | None) -> torch.Tensor:
        """Lengths to verify.

        Args:
            confidence: [bs, D] the drafter's confidence in each drafted token.
            alpha: [bs] per-request alpha, or None for the policy's own.

        Returns:
            int64 [bs]; a length above D asks for a further drafting pass.
        """
        ...


@dataclass(frozen=True)
class NoDraft:
    """Plain decoding: nothing is drafted, every round verifies only the anchor's own row."""

    name: str = "none"
    first_draft: int = 0
    needs_confidence: bool = False

    def decide(self, confidence: torch.Tensor, alpha: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(confidence.shape[0], dtype=torch.int64, device=confidence.device)


@dataclass(frozen=True)
class Static:
    """The same length every round, which is what SGLang's built-in DFLASH does."""

    length: int
    name: str = "static"
    needs_confidence: bool = False

    @property
    def first_draft(self) -> int:
        return self.length

    def decide(self, confidence: torch.Tensor, alpha: torch.Tensor | None) -> torch.Tensor:
        bs = confidence.shape[0]
        return torch.full((bs,), self.length, dtype=torch.int64, device=confidence.device)


@dataclass(frozen=True)
class LibraSpec:
    """Algorithm 1 of arXiv 2608.08721.

    ``draft_width`` tokens come from the first pass. The decision always starts from one block of
    ``block_size``: with a wide first pass the further blocks are there already.

    With ``max_length <= block_size`` the published loop would never run and the length would be
    fixed; there the start is one token below the maximum instead, so that control remains.
    """

    block_size: int
    max_length: int
    alpha: float
    draft_width: int
    name: str = "libraspec"
    needs_confidence: bool = True

    @property
    def first_draft(self) -> int:
        return self.draft_width

    def decide(self, confidence: torch.Tensor, alpha: torch.Tensor | None) -> torch.Tensor:
        return criterion.first_lengths(
            confidence,
            self.alpha if alpha is None else alpha,
            block_size=min(self.block_size, max(1, self.max_length - 1)),
            max_length=self.max_length,
        )


def build(
    name: str,
    *,
    block_size: int,
    max_length: int,
    alpha: float,
    static_length: int,
    wide: bool,
) -> Policy:
    """The policy called ``name``.

    Args:
        name: ``none``, ``static`` or ``libraspec``.
        block_size: n, tokens one drafting pass brings (a DFlash block less its anchor).
        max_length: d_max.
        alpha: T / (tau c).
        static_length: length of the ``static`` policy.
        wide: draft ``max_length`` tokens in the first pass instead of one block.
    """
    if name == "none":
        return NoDraft()
    if name == "static":
        return Static(length=static_length) if static_length else NoDraft(name="static")
    if name == "libraspec":
        first = max_length if wide else min(block_size, max_length)
        return LibraSpec(block_size, max_length, alpha, draft_width=first)
    raise ValueError(f"unknown policy {name!r}; known: libraspec, static, none")
