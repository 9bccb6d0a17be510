"""What a length policy is asked and told."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch


class Sampled(str):
    """Key of a request whose tokens are drawn, not the target's likeliest.

    The same confidence is worth less to it: a drafted token is accepted as often as the target
    draws it, however sure it is that the token is the likeliest.
    """


@dataclass(frozen=True)
class RoundTimes:
    """Where a round spent its time.

    Attributes:
        batch: requests.
        draft_rows: of the drafter's pass; 0 after a plain round.
        draft_seconds: of it, what depends on it (confidences, the decision) included.
        verify_rows: of the target's forward.
        verify_seconds: of it, with accepting and committing.
        elsewhere: seconds of the rest (scheduling, bookkeeping), the same work in every round;
            None when the round before was not the worker's.
    """

    batch: int
    draft_rows: int
    draft_seconds: float
    verify_rows: int
    verify_seconds: float
    elsewhere: float | None


class Policy:
    """Decides verified lengths; the methods that learn do nothing unless a policy wants them."""

    name: ClassVar[str]
    needs_confidence: ClassVar[bool] = False
    """Whether ``decide`` reads the confidences."""
    learns: ClassVar[bool] = False
    """Whether outcomes and times should be reported."""

    def prepare(self) -> None:
        """Do at start-up what the first round would otherwise wait for."""

    def pay_by_tiers(self, tiers: Sequence[int]) -> None:
        """The target's passes are padded to these numbers of rows (ascending), and cost as much."""

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        """Tokens the first drafting pass proposes; 0 skips drafting.

        Args:
            requests: a key per request of the batch, never reused by another request;
                :class:`Sampled` where it samples.
            cap: the longest length any of them may verify.
        """
        raise NotImplementedError

    def first_drafts(self, requests: Sequence[Hashable], caps: Sequence[int]) -> list[int]:
        """The same, request by request, where the drafter takes unequal ones (on a CPU)."""
        return [self.first_draft(requests, max(caps))] * len(caps)

    def decide(
        self, confidence: torch.Tensor, caps: torch.Tensor, alpha: torch.Tensor | None
    ) -> torch.Tensor:
        """Lengths to verify.

        Args:
            confidence: [bs, D] the drafter's confidence in each drafted token, NaN beyond what
                a request drafted.
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

    def learn_times(self, times: RoundTimes) -> None:
        """Where the round spent its time; only where the host can tell (on a CPU)."""

    def report(self) -> str:
        """What was learnt so far, for the log; empty if nothing."""
        return ""
