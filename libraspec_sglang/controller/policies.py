"""Length policies behind one small interface, chosen by ``--libraspec-policy``.

A policy says how many tokens the first drafting pass should bring and, given the drafter's
confidences, how many of them (or how many more) each request verifies. Zero is a length: the
round is then a plain decoding step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from libraspec_sglang.kernels import length_controller

from . import criterion, failfast
from .cost_file import Cost
from .failfast import FailFast
from .gemma import Gemma
from .libra import Libra
from .policy import Policy


@dataclass(frozen=True)
class Static(Policy):
    """The same length every round, which is what SGLang's built-in DFLASH does; 0 is plain."""

    name: ClassVar[str] = "static"
    length: int

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        return min(self.length, cap)

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
        start = min(self.block_size, max(1, self.max_length - 1))
        if length_controller.on_device(confidence.device):
            if alpha is None:
                alpha = torch.full(caps.shape, self.alpha, dtype=torch.float64, device=caps.device)
            return length_controller.lengths_algorithm_one(
                confidence, alpha, caps, block_size=start, max_length=self.max_length
            )
        lengths = criterion.first_lengths(
            confidence,
            self.alpha if alpha is None else alpha,
            block_size=start,
            max_length=self.max_length,
        )
        return torch.minimum(lengths, caps)


def build(
    name: str,
    *,
    block_size: int,
    max_length: int,
    alpha: float,
    static_length: int,
    wide: bool,
    threshold: float = failfast.THRESHOLD,
    increment: int = failfast.INCREMENT,
    cost: Cost | None = None,
) -> Policy:
    """The policy called ``name``.

    Args:
        name: ``libra``, ``libraspec``, ``failfast``, ``gemma``, ``static`` or ``none``.
        block_size: n, tokens one drafting pass brings (a DFlash block less its anchor).
        max_length: d_max.
        alpha: T / (tau c), of ``libraspec``.
        static_length: length of ``static``.
        wide: ``libraspec`` and ``failfast`` draft ``max_length`` tokens in the first pass instead
            of one block (or one increment, if that is longer).
        threshold: tau of ``failfast``.
        increment: N of ``failfast``.
        cost: what rounds cost here, of ``libra``.
    """
    if name == "none":
        return NoDraft()
    if name == "static":
        return Static(static_length)
    if name == "libraspec":
        return LibraSpec(
            block_size, max_length, alpha, max_length if wide else min(block_size, max_length)
        )
    if name == "failfast":
        width = max_length if wide else min(max(increment, block_size), max_length)
        return FailFast(increment, threshold, max_length, width)
    if name == "gemma":
        return Gemma(block_size, max_length)
    if name == "libra":
        return Libra(block_size, max_length, cost)
    raise ValueError(
        f"unknown policy {name!r}; known: libra, libraspec, failfast, gemma, static, none"
    )
