"""``failfast``: go on while the drafter is sure, in increments of a fixed size.

FailFast's rule as arXiv 2608.08721 runs it as a baseline: start with N tokens; while none of the
newest N has a confidence below tau, add N more, up to N_max. The increment in which the drafter
first hesitates is still verified whole. Its code's defaults, for a Fast-dLLM v2 drafter, are
N = 10, N_max = 60 and tau = 0.45 (0.5 / 0.45 / 0.4 for targets of 7B / 14B / 32B); N_max is d_max
here. Only the length rule is taken over: not the reuse of a rejected tail.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .policy import Policy

INCREMENT = 10
THRESHOLD = 0.45


@dataclass(frozen=True)
class FailFast(Policy):
    """The policy.

    Attributes:
        increment: N, tokens added at a time.
        threshold: tau, the confidence below which a token ends the extension.
        max_length: N_max.
        width: tokens of the first drafting pass, at least min(N, N_max).
    """

    name: ClassVar[str] = "failfast"
    needs_confidence: ClassVar[bool] = True
    increment: int
    threshold: float
    max_length: int
    width: int

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        return self.width if cap else 0

    def decide(
        self, confidence: torch.Tensor, caps: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Lengths as far as [bs, D] confidences reach; a wish above D asks for more. NaN is low."""
        whole = confidence.shape[1] // self.increment
        sure = confidence[:, : whole * self.increment] >= self.threshold
        sure = sure.view(len(confidence), whole, self.increment).all(dim=2)
        passed = sure.to(torch.int64).cumprod(dim=1).sum(dim=1)
        lengths = ((passed + 1) * self.increment).clamp(max=self.max_length)
        return torch.minimum(lengths, caps)
