"""State a batch carries from round to round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class LibraSpecDraftInput(DFlashDraftInputV2):
    """DFLASH's draft input, with the penalty bookkeeping that DFLASH leaves out."""

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
        """Reserve the round's slots; count the last token towards penalties, as plain decoding."""
        super().prepare_for_decode(batch)
        if batch.sampling_info.penalizer_orchestrator.is_required:
            batch.cumulate_penalty_output_tokens()
