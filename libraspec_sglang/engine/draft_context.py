"""Target hidden states on their way into the drafter's KV cache.

A drafted round writes them at once: the next draft reads them. While a batch decodes plainly nobody
does, and a projection per token and layer of the drafter for each round is what makes a plain round
dearer than plain decoding. Then they wait, and are written together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

MOST_ROWS = 256
"""Rows that wait at most: bounds the memory (10 MB for five layers of 4096 in bfloat16)."""


class DraftContext:
    """The worker's way to the drafter's KV cache.

    Whoever else writes or reads that cache (a prefill, a draft) calls :meth:`flush` before. Slots
    never repeat among waiting rounds: they are of one set of requests, whose slots only grow.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        """Args: write: called with keywords target_hidden [N, H], cache_loc [N], positions [N]."""
        self._write = write
        self._requests: Sequence[str] = ()
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(
        self,
        requests: Sequence[str],
        hidden: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        wait: bool,
    ) -> None:
        """Take in a round.

        Args:
            requests: keys of the batch.
            hidden: [N' >= N, H] of the rows the target verified, H from all captured layers; rows
                beyond N are padding.
            slots: [N] of the drafter's KV cache.
            positions: [N] of the rows in their sequences.
            wait: nothing will read them next round.
        """
        if self._waiting and (requests != self._requests or not wait):
            self.flush()
        self._requests = requests
        self._waiting.append((hidden[: len(slots)], slots, positions))
        if not wait or len(self._waiting) * len(slots) >= MOST_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        columns = waiting[0] if len(waiting) == 1 else map(torch.cat, zip(*waiting, strict=True))
        hidden, slots, positions = columns
        self._write(target_hidden=hidden, cache_loc=slots, positions=positions)
