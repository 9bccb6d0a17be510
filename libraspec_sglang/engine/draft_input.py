"""State a batch carries from round to round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator


class LibraSpecDraftInput(DFlashDraftInputV2):
    """DFLASH's draft input, with the penalty bookkeeping that DFLASH leaves out."""

    penalties: BatchedPenalizerOrchestrator | None = None
    """The batch's penalties, None where no request has any; set anew before every round."""

    @classmethod
    def make(cls, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> LibraSpecDraftInput:
        """Args: bonus_tokens, seq_lens: [bs] next anchors and committed lengths."""
        bs, device = int(seq_lens.numel()), bonus_tokens.device
        return cls(
            topk_p=torch.empty((bs, 0), device=device),
            topk_index=torch.empty((bs, 0), device=device, dtype=torch.int64),
            bonus_tokens=bonus_tokens.to(torch.int64),
            new_seq_lens=seq_lens.to(torch.int64),
            hidden_states=torch.empty((bs, 0), device=device, dtype=torch.float16),
        )

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve the round's slots; remember who keeps count for penalties."""
        super().prepare_for_decode(batch)
        penalties = batch.sampling_info.penalizer_orchestrator
        self.penalties = penalties if penalties.is_required else None

    def count_penalties(self) -> None:
        """Count each request's newest token, the anchor, towards its penalties.

        Done at the start of a round, where the anchor is known also under overlap scheduling;
        SGLang's own count reads the host's copy of the output, which lags a round behind there.
        Accepted drafted tokens were counted when they were accepted.
        """
        if self.penalties is not None:
            self.penalties.cumulate_output_tokens(self.bonus_tokens)
