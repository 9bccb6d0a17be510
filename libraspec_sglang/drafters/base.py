"""What a drafter gives the controller."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Window:
    """The positions a round may write, one row per request; the KV plan holds their slots.

    Attributes:
        anchor: int64 [bs], the last token of each request (accepted, its KV not yet written).
        prefix_lens: int64 [bs], tokens whose KV is in the cache; the anchor's position.
        positions: int64 [bs, W], ``prefix_lens + 0..W-1``.
    """

    anchor: torch.Tensor
    prefix_lens: torch.Tensor
    positions: torch.Tensor

    @property
    def width(self) -> int:
        return int(self.positions.shape[1])


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens.

    Attributes:
        tokens: int64 [bs, D]; anything beyond what a request drafted.
        confidence: float32 [bs, D], the probability the drafter gave each of them; NaN where it
            was not asked for, and beyond what a request drafted.
        rows: of the drafter's pass, anchors included.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor
    rows: int = 0

    @classmethod
    @lru_cache(maxsize=512)
    def none(cls, bs: int, device: torch.device) -> Proposal:
        """Nothing drafted for ``bs`` requests."""
        empty = torch.empty((bs, 0), device=device)
        return cls(empty.to(torch.int64), empty)

    @property
    def length(self) -> int:
        return int(self.tokens.shape[1])

    def behind(self, anchor: torch.Tensor) -> torch.Tensor:
        """int64 [bs, 1 + D]: the drafted tokens behind each request's ``anchor`` [bs]."""
        anchor = anchor[:, None]
        return torch.cat([anchor, self.tokens], dim=1) if self.length else anchor
