"""What a round brought, on its way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from libraspec_sglang.controller.policy import Policy


@dataclass(frozen=True)
class Outcome:
    """For :meth:`Policy.learn`, which needs it there. The transfer keeps nobody waiting.

    Attributes:
        requests: keys of the batch's requests.
        confidence: float32 [bs, D] of the draft, on the host once the transfer is done.
        verified: int64 [bs], drafted tokens verified.
        gained: int32 [bs], tokens gained, the bonus included; likewise.
    """

    requests: list[str]
    confidence: torch.Tensor
    verified: np.ndarray
    gained: torch.Tensor
    _arrived: torch.cuda.Event | None

    @classmethod
    def of(
        cls,
        requests: list[str],
        confidence: torch.Tensor,
        lens: Sequence[int],
        gained: torch.Tensor,
    ) -> Outcome:
        """Of a round that verified ``lens`` rows; starts the transfer, if there is one."""
        verified, arrived = np.asarray(lens) - 1, None
        if confidence.is_cuda:
            confidence, gained = _to_host(confidence), _to_host(gained)
            arrived = torch.cuda.Event()
            arrived.record()
        return cls(requests, confidence, verified, gained, arrived)

    def teach(self, policy: Policy) -> None:
        """Tell the policy, waiting for the transfer if that is still under way."""
        if self._arrived is not None:
            self._arrived.synchronize()
        accepted = self.gained.numpy().astype(np.int64) - 1
        policy.learn(self.requests, self.confidence.numpy(), self.verified, accepted)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
