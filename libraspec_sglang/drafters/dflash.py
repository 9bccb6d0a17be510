"""DFlash as a drafter: one bidirectional pass over an anchor and masks drafts a whole block.

The draft model reads the target's hidden states of the committed tokens from its own KV cache and
the block [anchor, MASK, MASK, ...] as queries; every mask becomes a token. SGLang's DFLASH worker
owns the model, its KV pool and the mask id; this module only decides what goes into a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from libraspec_sglang.upload import upload_together
from libraspec_sglang.verify.layout import VerifyRows, packed_index, ragged_layout, verify_rows

from .base import Proposal, Window
from .head import DraftHead

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2


class DFlashDrafter:
    """Drafts blocks with the draft model that a DFLASH worker has loaded."""

    def __init__(self, worker: DFlashWorkerV2, embed: torch.nn.Module, head: DraftHead) -> None:
        self._runner = worker.draft_model_runner
        self._layout = worker.draft_parallel_layout
        self._mask_id = int(worker._mask_token_id)
        self._embed_scale = float(worker._noise_embed_scale)
        self._embed = embed
        self._head = head
        self._spec_infos: dict[int, object] = {}

    def propose(
        self,
        batch: ScheduleBatch,
        window: Window,
        plan: KVLocPlan,
        lengths: Sequence[int],
        *,
        known: Proposal | None = None,
        confidence: bool = True,
    ) -> Proposal:
        """Draft ``lengths[r]`` tokens for each request in one pass.

        The pass covers 1 + length slots of a request's window: the anchor, then ``known`` tokens
        drafted earlier this round (a further block is conditioned on them), then masks. Known
        tokens and their confidences are returned as they were.

        Args:
            batch: the running batch, for its request rows and host lengths.
            window: the round's slots, W >= 1 + the longest length.
            plan: KV ids of the window.
            lengths: [bs] tokens to return per request; unequal ones need FlashInfer without graphs.
            known: the first block of this round, shorter than the lengths, which are equal then.
            confidence: whether confidences are wanted; NaN otherwise.
        """
        bs = window.anchor.shape[0]
        rows = verify_rows([n + 1 for n in lengths], window.width, window.anchor.device)
        first = 0 if known is None else known.length
        block = window.anchor.new_full((bs, window.width), self._mask_id)
        block[:, 0] = window.anchor
        if known is not None:
            block[:, 1 : first + 1] = known.tokens
        hidden = self._forward(batch, window, plan, rows, rows.take(block))
        if rows.index is not None:
            return self._ragged(hidden, rows, confidence)
        new = hidden.view(bs, rows.width, -1)[:, first + 1 :].reshape(-1, hidden.shape[-1])
        tokens, confident = self._head(new, confidence=confidence)
        tokens = tokens.view(bs, -1)
        if confident is None:
            confident = torch.full(tokens.shape, float("nan"), device=tokens.device)
        confident = confident.view(bs, -1)
        if known is not None:
            tokens = torch.cat([known.tokens, tokens], dim=1)
            confident = torch.cat([known.confidence, confident], dim=1)
        return Proposal(tokens, confident, rows.total)

    def _ragged(self, hidden: torch.Tensor, rows: VerifyRows, confidence: bool) -> Proposal:
        """Unequal numbers of tokens from the hidden states [T, H] of ``rows``."""
        lengths, device = np.asarray(rows.lens) - 1, hidden.device
        bs, depth = len(lengths), rows.width - 1
        request = np.repeat(np.arange(bs), lengths)
        masks = np.arange(len(request)) + request + 1  # every request's rows begin with its anchor
        rows_drafted, place = upload_together([masks, packed_index(lengths, depth)], device)
        tokens, confident = self._head(hidden.index_select(0, rows_drafted), confidence=confidence)
        all_tokens = tokens.new_zeros(bs * depth)
        all_tokens[place] = tokens
        chances = torch.full((bs * depth,), float("nan"), device=device)
        if confident is not None:
            chances[place] = confident
        return Proposal(all_tokens.view(bs, depth), chances.view(bs, depth), rows.total)

    @torch.inference_mode()
    def _forward(
        self,
        batch: ScheduleBatch,
        window: Window,
        plan: KVLocPlan,
        rows: VerifyRows,
        block: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states [T, H] of the draft model over ``block`` [T], the tokens of ``rows``."""
        bs, width = len(rows.lens), rows.width
        embeds = self._embed(block)
        if self._embed_scale != 1.0:
            embeds = embeds * self._embed_scale
        host_lens = batch.seq_lens_cpu
        if host_lens is None:
            host_lens = batch.spec_info.nxt_kv_lens_cpu
        # An upper bound is all the attention planner needs: the committed prefix and the block.
        host_lens = host_lens.to(torch.int32) + width
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=window.prefix_lens,
            out_cache_loc=None,
            seq_lens_sum=int(host_lens.sum()),
            seq_lens_cpu=host_lens,
            positions=rows.take(window.positions),
            input_embeds=embeds,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._spec_info(rows),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), rows.total, dtype=torch.int32, device=block.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=rows.total,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        plan.bind(forward_batch, self._runner.kv_index_translator, cols=rows.columns)
        with draft_tp_context(self._layout):
            out = self._runner.forward(forward_batch)
        return out.logits_output.hidden_states

    def _spec_info(self, rows: VerifyRows):
        width, device = rows.width, rows.request.device
        if rows.index is not None:
            ragged = make_draft_block_spec_info(draft_token_num=width, device=device)
            ragged.ragged_verify_layout = ragged_layout(rows)
            return ragged
        if width not in self._spec_infos:
            self._spec_infos[width] = make_draft_block_spec_info(
                draft_token_num=width, device=device
            )
        return self._spec_infos[width]
