"""The target's forward over a round's packed rows."""

from __future__ import annotations

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from libraspec_sglang.verify.layout import VerifyRows, padded, ragged_layout

from .graphs import RaggedGraphRunner


class TargetPass:
    """Verifies the rows of a window of ``window_width`` slots."""

    def __init__(self, target_worker, window_width: int, logits_processor) -> None:
        """Args: logits_processor: the target's, where DFLASH defers its tensor-parallel gather of
        a verification's logits; else None."""
        self._target_worker = target_worker
        self._logits_processor = logits_processor
        self._window_width = window_width
        self._graphs: RaggedGraphRunner | None = None

    def use_graphs(self, graphs: RaggedGraphRunner) -> None:
        """Replay captured tiers from now on, where a round fits one."""
        self._graphs = graphs

    @property
    def captured(self) -> bool:
        """Whether rounds replay graphs, whose plans need committed lengths on the host."""
        return self._graphs is not None

    def prepare(
        self,
        rows: VerifyRows,
        drafted: torch.Tensor,
        positions: torch.Tensor,
        kv_plan,
        committed: list[int] | None = None,
    ) -> DFlashVerifyInput:
        """SGLang's verify input.

        Args:
            rows: which part of each window is verified.
            drafted: [bs, 1 + D] anchor and drafted tokens.
            positions: [rows.total] of the packed rows.
            kv_plan: the windows' KV slots.
            committed: [bs] tokens of each request so far, where rounds are captured.
        """
        spread = None
        if rows.index is not None or self.captured:
            spread = drafted.new_empty((drafted.shape[0], self._window_width))
            spread[:, : drafted.shape[1]] = drafted
        if self.captured:
            size = self._graphs.tier(len(rows.lens), rows.total) or rows.total
            return DFlashVerifyInput(
                draft_token=padded(rows.take(spread), size),
                positions=padded(positions, size),
                draft_token_num=rows.width,
                num_tokens_per_req=1,
                capture_hidden_mode=CaptureHiddenMode.FULL,
                ragged_verify_layout=ragged_layout(rows, size),
                live_seq_lens_cpu=torch.tensor(committed, dtype=torch.int32),
                kv_loc_plan=kv_plan,
                kv_loc_cols=rows.places(size),
            )
        if rows.index is None:
            tokens, layout = drafted[:, : rows.width].reshape(-1), None
        else:
            tokens, layout = rows.take(spread), ragged_layout(rows)
        return DFlashVerifyInput(
            draft_token=tokens,
            positions=positions,
            draft_token_num=rows.width,
            # Unequal to any captured width, so that a ragged batch never replays a uniform graph.
            num_tokens_per_req=rows.width if layout is None else 1,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            ragged_verify_layout=layout,
            kv_loc_plan=kv_plan,
            kv_loc_cols=rows.columns,
        )

    def run(
        self, batch, rows: VerifyRows, verify_input: DFlashVerifyInput
    ) -> GenerationBatchResult:
        """One target pass, of logits and hidden states for ``rows``.

        The batch's host lengths are restored after it was set up. What a graph returns is its own
        memory: it is overwritten by the next pass.
        """
        batch.out_cache_loc = verify_input.kv_loc_plan.virtual_write_ids(
            cols=verify_input.kv_loc_cols
        )
        lens_cpu, lens_sum = batch.seq_lens_cpu, batch.seq_lens_sum
        if lens_cpu is not None:
            batch.seq_lens_cpu = lens_cpu + rows.width
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        else:
            batch.seq_lens_cpu = batch.spec_info.nxt_kv_lens_cpu
            batch.seq_lens_sum = int(batch.spec_info.nxt_kv_lens_sum)
        planned = True
        if lens_cpu is not None and rows.width == 1 and not self.captured:
            forward_batch, planned = self._decode(batch, verify_input), False
        else:
            forward_batch, _ = verify_input.prepare_for_verify(batch, self._target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = lens_cpu, lens_sum
        result = self._target_worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=planned or None,
        )
        output = result.logits_output
        if output.next_token_logits.shape[0] > rows.total:
            output.next_token_logits = output.next_token_logits[: rows.total]
            output.hidden_states = output.hidden_states[: rows.total]
        gather = self._logits_processor
        if gather is not None and gather.is_deferred_shard(output.next_token_logits):
            output.next_token_logits = gather.finish_deferred_gather(output.next_token_logits)
        return result

    def _decode(self, batch, verify_input: DFlashVerifyInput) -> ForwardBatch:
        """The forward of a round without drafted tokens: plain decoding's own, at its price.

        FlashInfer's decode plan takes host lengths that are exact, so the batch must have them.
        """
        before = batch.forward_mode, batch.spec_info, batch.seq_lens
        batch.forward_mode, batch.spec_info = ForwardMode.DECODE, None
        batch.input_ids = verify_input.draft_token
        batch.seq_lens = batch.seq_lens + 1  # a decode's lengths count the token it reads
        forward_batch = ForwardBatch.init_new(
            batch,
            self._target_worker.model_runner,
            capture_hidden_mode=verify_input.capture_hidden_mode,
            return_hidden_states_before_norm=False,
            kv_loc_plan=verify_input.kv_loc_plan,
            write_cols=verify_input.kv_loc_cols,
        )
        batch.forward_mode, batch.spec_info, batch.seq_lens = before
        return forward_batch
