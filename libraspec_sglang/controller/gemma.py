"""``gemma``: the length follows the last round's outcome, without looking at confidences.

Two tokens longer after a round in which everything verified was accepted, one shorter after any
other: the rule of assisted generation, which arXiv 2608.08721 adapts as its "Gemma-style"
baseline. No start is published there; a request starts at one block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from libraspec_sglang.upload import upload

from .policy import Policy

UP, DOWN = 2, 1
REQUESTS_REMEMBERED = 1024


class Gemma(Policy):
    """The policy's state: a length per request. Not thread-safe: one per worker."""

    name = "gemma"
    learns = True

    def __init__(self, block_size: int, max_length: int) -> None:
        """Args:
        block_size: n, the length a request starts with.
        max_length: d_max; lengths stay in 1..d_max.
        """
        self._start, self._most = min(block_size, max_length), max_length
        self._length: OrderedDict[Hashable, int] = OrderedDict()
        self._now = np.zeros(0, dtype=np.int64)

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        lengths = [self._length.get(request, self._start) for request in requests]
        self._now = np.array(lengths, dtype=np.int64)
        return min(max(lengths), cap)

    def decide(
        self, confidence: torch.Tensor, caps: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The lengths of the requests :meth:`first_draft` was last asked about."""
        return torch.minimum(upload(self._now, caps.device), caps)

    def learn(
        self,
        requests: Sequence[Hashable],
        confidence: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Lengthen or shorten; a request that verified nothing stays as it is."""
        for request, tried, kept in zip(requests, verified, accepted, strict=True):
            if tried < 1:
                continue
            length = self._length.pop(request, self._start)
            length += UP if kept >= tried else -DOWN
            self._length[request] = min(max(length, 1), self._most)  # now the most recent
        while len(self._length) > REQUESTS_REMEMBERED:
            self._length.popitem(last=False)
