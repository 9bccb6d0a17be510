"""Length policies behind one small interface, chosen by ``--libraspec-policy``.

A policy says how many tokens the first drafting pass should bring and, given the drafter's
confidences, how many of them (or how many more) each request verifies. Zero is a length: the
round is then a plain decoding step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from . import criterion
from .libra import Libra


class Policy:
    """Decides verified lengths; the methods that learn do nothing unless a policy wants them."""

    name: ClassVar[str]
    needs_confidence: ClassVar[bool] = False
    """Whether ``decide`` reads the confidences."""
    learns: ClassVar[bool] = False
    """Whether outcomes and times should be reported."""

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        """Tokens the first drafting pass proposes; 0 skips drafting.

        Args:
            requests: a key per request of the batch, never reused by another request.
            cap: the longest length any of them may verify.
        """
        raise NotImplementedError

    def decide(
        self, confidence: torch.Tensor, caps: torch.Tensor, alpha: torch.Tensor | None
    ) -> torch.Tensor:
        """Lengths to verify.

        Args:
            confidence: [bs, D] the drafter's confidence in each drafted token.
            caps: int64 [bs], largest length per request.
            alpha: [bs] per-request alpha, or None for the policy's own.

        Returns:
            int64 [bs], at most ``caps``; a length above D asks for a further drafting pass.
        """
        raise NotImplementedError

    def learn(
        self,
        requests: Sequence[Hashable],
        confidence: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """A round's outcome: drafted tokens verified and accepted per request."""

    def learn_times(
        self,
        batch: int,
        draft_rows: int,
        draft_seconds: float,
        verify_rows: int,
        verify_seconds: float,
    ) -> None:
        """A round's two forwards, for ``batch`` requests."""

    def learn_elsewhere(self, seconds: float) -> None:
        """Seconds the round spent outside them."""


@dataclass(frozen=True)
class Static(Policy):
    """The same length every round, which is what SGLang's built-in DFLASH does; 0 is plain."""

    name: ClassVar[str] = "static"
    length: int

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        return self.length if cap else 0

    def decide(self, confidence, caps, alpha):
        return caps.clamp(max=self.length)


@dataclass(frozen=True)
class NoDraft(Static):
    """Plain decoding: every round verifies only the anchor's own row."""

    name: ClassVar[str] = "none"
    length: int = 0


@dataclass(frozen=True)
class LibraSpec(Policy):
    """Algorithm 1 of arXiv 2608.08721.

    ``width`` tokens come from the first pass. The decision always starts from one block of
    ``block_size``: with a wide first pass the further blocks are there already.

    With ``max_length <= block_size`` the published loop would never run and the length would be
    fixed; there the start is one token below the maximum instead, so that control remains.
    """

    name: ClassVar[str] = "libraspec"
    needs_confidence: ClassVar[bool] = True
    block_size: int
    max_length: int
    alpha: float
    width: int

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        return self.width if cap else 0

    def decide(self, confidence, caps, alpha):
        lengths = criterion.first_lengths(
            confidence,
            self.alpha if alpha is None else alpha,
            block_size=min(self.block_size, max(1, self.max_length - 1)),
            max_length=self.max_length,
        )
        return torch.minimum(lengths, caps)


class LibraPolicy(Policy):
    """Measured cost, calibrated survival, the whole batch at once; see :mod:`.libra`."""

    name = "libra"
    needs_confidence = True
    learns = True

    def __init__(self, block_size: int, max_length: int) -> None:
        self._libra = Libra(block_size, max_length)
        self.first_draft = self._libra.first_draft
        self.learn = self._libra.learn
        self.learn_times = self._libra.learn_times
        self.learn_elsewhere = self._libra.learn_elsewhere

    def decide(self, confidence, caps, alpha):
        lengths = self._libra.decide(confidence.cpu().numpy(), caps.cpu().numpy())
        return torch.from_numpy(lengths).to(confidence.device)


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
        name: ``libra``, ``libraspec``, ``static`` or ``none``.
        block_size: n, tokens one drafting pass brings (a DFlash block less its anchor).
        max_length: d_max.
        alpha: T / (tau c), of ``libraspec``.
        static_length: length of ``static``.
        wide: ``libraspec`` drafts ``max_length`` tokens in the first pass instead of one block.
    """
    if name == "none":
        return NoDraft()
    if name == "static":
        return Static(static_length)
    if name == "libraspec":
        return LibraSpec(
            block_size, max_length, alpha, max_length if wide else min(block_size, max_length)
        )
    if name == "libra":
        return LibraPolicy(block_size, max_length)
    raise ValueError(f"unknown policy {name!r}; known: libra, libraspec, static, none")
