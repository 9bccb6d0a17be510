"""Penalties at rows behind drafted tokens.

A request's frequency, presence and repetition penalties and its ``min_new_tokens`` depend on the
tokens it has so far, and behind drafted tokens those are part of them. SGLang keeps count per
request, so the count is walked: the anchors' rows are penalised, the first drafted tokens counted,
the rows behind them penalised, and so on, by SGLang's own code. What was not accepted is taken
back from the count afterwards.

A depth costs a pass over the batch's [bs, V] logits and counts: small beside a forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .layout import VerifyRows

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator

COUNTS = (
    "cumulated_frequency_penalties",
    "cumulated_presence_penalties",
    "cumulated_repetition_penalties",
)
"""[bs, V] per penalizer of SGLang, of which a token changes one entry per request."""

LENGTH = "len_output_tokens"
"""[bs, 1] of SGLang's ``min_new_tokens`` penalizer, which a token raises by one."""


class PenaltyWalk:
    """One round's walk along the drafted tokens of a batch.

    Args:
        penalties: the batch's, with the anchors counted.
        drafted: int64 [bs, D], the drafted tokens.
        depth: drafted tokens verified by the request with penalties that verifies most.
        summed: add penalties up before they are applied, as SGLang does under overlap scheduling,
            instead of applying one after the other; the two round differently.
    """

    def __init__(
        self,
        penalties: BatchedPenalizerOrchestrator,
        drafted: torch.Tensor,
        depth: int,
        *,
        summed: bool,
    ) -> None:
        self._penalties = penalties
        self._repeat = 1 if summed else None
        # A drafter's token outside the vocabulary is never accepted, whatever it is counted as.
        self._tokens = drafted[:, :depth].clamp(0, penalties.vocab_size - 1)
        active = [p for p in penalties.penalizers.values() if p.is_prepared()]
        self._counts = [getattr(p, name) for p in active for name in COUNTS if hasattr(p, name)]
        self._lengths = [getattr(p, LENGTH) for p in active if hasattr(p, LENGTH)]
        self._before: list[list[torch.Tensor]] = []

    def apply(self, logits: torch.Tensor, rows: VerifyRows, own: torch.Tensor) -> None:
        """Penalise rows in place.

        Args:
            logits: [T, V] of the verified rows.
            rows: their layout.
            own: bool [bs], requests to penalise.
        """
        last = rows.first + rows.lengths - 1
        for depth in range(self._tokens.shape[1] + 1):
            if depth:
                self._count(self._tokens[:, depth - 1])
            at = torch.minimum(rows.first + depth, last)
            plain = logits[at]
            penalised = plain.clone()
            self._penalties.apply(penalised, repeat=self._repeat)
            here = own & (rows.lengths > depth)
            logits[at] = torch.where(here[:, None], penalised, plain)

    def _count(self, tokens: torch.Tensor) -> None:
        self._before.append([counts.gather(1, tokens[:, None]) for counts in self._counts])
        self._penalties.cumulate_output_tokens(tokens)

    def keep(self, accepted: torch.Tensor) -> None:
        """Take the drafted tokens back that were not accepted.

        Args:
            accepted: int [bs], drafted tokens accepted per request.
        """
        for depth, before in reversed(list(enumerate(self._before))):
            kept, token = (accepted > depth)[:, None], self._tokens[:, depth, None]
            for counts, entry in zip(self._counts, before, strict=True):
                counts.scatter_(1, token, torch.where(kept, counts.gather(1, token), entry))
            for length in self._lengths:
                length.sub_((~kept).to(length.dtype))
        self._before.clear()


def mark_counted(penalties: BatchedPenalizerOrchestrator) -> None:
    """Note when, on a GPU, a round's counts will be complete; see :func:`wait_until_counted`."""
    if torch.device(penalties.device).type == "cuda":
        penalties.libraspec_counted = torch.cuda.Event()
        penalties.libraspec_counted.record()


def wait_until_counted(penalties: BatchedPenalizerOrchestrator) -> None:
    """Let the current stream wait for the counts of the round under way.

    SGLang drops and adds requests of a batch on another stream than the one rounds count on.
    """
    counted = getattr(penalties, "libraspec_counted", None)
    if counted is not None:
        counted.wait()
