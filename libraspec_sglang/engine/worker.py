"""The speculative worker: one round from drafting to commit.

Subclass of SGLang's DFLASH worker, which loads the draft model, shares the target's KV slots with
it (so radix-cache hits are the drafter's too) and fills its cache during prefill. What differs is
the decode round: the drafter's confidences decide how many tokens each request verifies, and the
target's forward then holds just those rows.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from libraspec_sglang import options
from libraspec_sglang.controller.policy import RoundTimes
from libraspec_sglang.drafters import checkpoint
from libraspec_sglang.drafters.base import Proposal, Window
from libraspec_sglang.drafters.dflash import DFlashDrafter
from libraspec_sglang.drafters.head import build_head
from libraspec_sglang.kernels import length_controller
from libraspec_sglang.observe.trace import RoundClock, TraceWriter
from libraspec_sglang.verify.accept import Accepted, accept
from libraspec_sglang.verify.choose import PathDependence, adjust_logits, choose, prepare_seeded
from libraspec_sglang.verify.layout import VerifyRows, verify_rows
from libraspec_sglang.verify.penalties import mark_counted

from . import graphs, limits, machine
from .draft_context import DraftContext
from .draft_input import LibraSpecDraftInput
from .outcome import Outcome
from .report import say_what_is_active
from .target_pass import TargetPass

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)

REPORT_EVERY = 4096
"""Rounds between two log lines of what a policy has learnt."""


class LibraSpecWorker(DFlashWorkerV2):
    """DFLASH worker whose verified lengths are decided per request and round."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._options = options.load()
        draft = checkpoint.read(
            get_spec().speculative_draft_model_path,
            get_spec().speculative_draft_model_revision,
            block_size=get_spec().speculative_dflash_block_size,
        )
        self._window_width = self.block_size  # as the algorithm resolved it, for this server
        self._host_timed = str(self.device) == "cpu"
        planned = checkpoint.plan_lengths(
            self._options, draft.block_size, host_timed=self._host_timed
        )
        self._lengths = replace(planned, max_length=min(planned.max_length, self._window_width - 1))
        self._context_len = int(self.model_runner.model_config.context_len)
        self._tp_group = get_parallel().tp_group
        target_model = target_worker.model_runner.model
        lm_head = unwrap_lora_layer(target_model.lm_head)
        self._drafter = DFlashDrafter(
            self,
            unwrap_lora_layer(target_model.get_input_embeddings()),
            build_head(
                lm_head,
                int(self.model_runner.model_config.vocab_size),
                draft.hot_token_ids,
                self._tp_group if self._tp_group.world_size > 1 else None,
            ),
        )
        self._target = TargetPass(target_worker, self._window_width, self._target_logits_processor)
        self._draft_context = DraftContext(self._append_target_hidden_to_draft_kv_by_loc)
        self._full_rows = False
        self._draft_is_captured = False
        self._draft_vocabulary = draft.hot_token_ids and len(draft.hot_token_ids)
        draft_config = self.draft_model_runner.model_config
        circumstances = machine.circumstances(
            str(self.device),
            self._tp_group.world_size,
            self.model_runner.model_config,
            draft.config,
            draft_config.dtype,
            self._draft_vocabulary,
        )
        self._policy = self._lengths.policy(machine.cost(self._options, circumstances))
        self._policy.prepare()
        self._on_device = length_controller.on_device(torch.device(self.device))
        # Rounds that overlap with the host's work must not wait for what they brought.
        self._learns_late = self._on_device and not server_args.disable_overlap_schedule
        self._unlearnt: Outcome | None = None
        self._trace = self._open_trace(draft.block_size, circumstances)
        waits = self._trace is not None and not self._host_timed
        self._clock = RoundClock(torch.cuda.synchronize if waits else None)

    # -- SGLang's hooks ------------------------------------------------------------------

    def _validate_phase1_sampling_support(self, batch) -> None:
        """DFLASH warns here that it decodes greedily where its kernel is missing; we sample."""

    def _maybe_build_draft_sampler(self):
        """DFLASH's in-graph head gives only tokens; ours runs after it and gives confidences."""
        return None

    def _make_next_draft_input_prefill(self, *, bonus_tokens, seq_lens):
        return LibraSpecDraftInput.make(bonus_tokens, seq_lens)

    def _make_next_draft_input_decode(self, *, bonus_tokens, new_seq_lens):
        return LibraSpecDraftInput.make(bonus_tokens, new_seq_lens)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        row_width = int(self.model_runner.req_to_token_pool.req_to_token.shape[1])
        needed = self._context_len + 2 * self._window_width
        if row_width < needed:
            raise RuntimeError(
                f"request rows hold {row_width} slots, but a context of {self._context_len} and "
                f"the reservation of a round need {needed}; lower --libraspec-max-length"
            )
        captured = self.model_runner.decode_cuda_graph_runner
        flashinfer = isinstance(self.model_runner.attn_backend, FlashInferAttnBackend)
        if isinstance(captured, graphs.RaggedGraphRunner):
            self._target.use_graphs(captured)
            self._policy.pay_by_tiers(captured.capture_num_tokens)
            draft = self.draft_model_runner
            self._draft_is_captured = draft.decode_cuda_graph_runner not in (
                None,
                draft.eager_runner,
            )
        else:
            # SGLang gives every request of a batch as many multimodal positions.
            by_request = self.model_runner.model_config.model_is_mrope
            self._full_rows = captured is not None or not flashinfer or by_request
        if self._full_rows:
            logger.warning(
                "LibraSpec: every request verifies the whole window of %d tokens (%s); pass "
                "--attention-backend flashinfer and --cuda-graph-backend-decode disabled to "
                "verify the decided lengths.",
                self._window_width,
                graphs.obstacle(self.model_runner) or "--libraspec-graphs whole",
            )
        if self.server_args.enable_deterministic_inference:
            vocabulary = int(self.model_runner.model_config.vocab_size)
            prepare_seeded(self.model_runner.sampler, vocabulary, str(self.device))
        if self._tp_group.rank_in_group == 0:
            say_what_is_active(
                self._policy,
                self._options,
                self._lengths,
                window=self._window_width,
                draft_vocabulary=self._draft_vocabulary,
                attention=type(self.model_runner.attn_backend).__name__,
                rows=self._rows_in_words(),
                on_device=self._on_device,
                device=str(self.device),
            )

    def forward_batch_generation(
        self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            self._clock.pause()
            self._draft_context.flush()
            return super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
        if batch.seq_lens.is_cuda:
            # Carried over from the previous iteration, perhaps on another stream.
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        return self._round(batch, on_publish, grammar_barrier)

    # -- one round -----------------------------------------------------------------------

    def _round(self, batch: ScheduleBatch, on_publish, grammar_barrier) -> GenerationBatchResult:
        """Propose, decide, verify, accept, commit."""
        clock = self._clock
        gap = clock.start()
        batch.spec_info.count_penalties()
        penalties = batch.spec_info.penalties  # the target forward puts its own input there
        window, kv_plan = self._open_window(batch)
        path = PathDependence.of(batch.reqs)
        caps = limits.caps(
            batch.reqs,
            path.anchored,
            window,
            context_len=self._context_len,
            on_host=not self._on_device,
        )
        requests = [limits.key(r) for r in batch.reqs]
        lengths = self._first_drafts(requests, caps)
        clock.lap("window")

        proposal = self._propose(batch, window, kv_plan, lengths)
        clock.lap("draft")
        alpha = limits.alpha(batch.reqs, self._options.alpha, window.anchor.device)
        lens, committed = self._decide(proposal, caps, alpha, window)
        clock.lap("decide")
        if max(lens) > proposal.length + 1:
            proposal = self._drafter.propose(
                batch, window, kv_plan, [self._window_width - 1] * len(lens), known=proposal
            )
            clock.lap("draft")
            lens, committed = self._decide(proposal, caps, alpha, window)
            clock.lap("decide")
        if self._unlearnt is not None and proposal.length:  # the host has just waited for lengths
            self._unlearnt.teach(self._policy)
            self._unlearnt = None

        rows = verify_rows(lens, self._window_width, window.anchor.device)
        drafted, positions = proposal.behind(window.anchor), rows.take(window.positions)
        verify_input = self._target.prepare(rows, drafted, positions, kv_plan, committed)
        followed = path.drafted(proposal.tokens, rows)  # asked for later, it would wait for a pass
        clock.lap("layout")

        target_out = self._target.run(batch, rows, verify_input)
        logits_output = target_out.logits_output
        logits = logits_output.next_token_logits
        clock.lap("verify")

        penalty_walk = adjust_logits(
            logits,
            batch.sampling_info,
            rows,
            path,
            proposal.tokens,
            followed,
            penalties,
            grammar_barrier,
        )
        choices = choose(
            logits,
            batch.sampling_info,
            rows,
            positions,
            self.model_runner.sampler,
            keep_logits=batch.return_logprob,
        )
        self._broadcast(choices)
        accepted = accept(
            choices,
            proposal.tokens,
            rows,
            self._window_width,
            limits=caps if self._full_rows else None,
        )
        if penalty_walk is not None:
            penalty_walk.keep(accepted.commit_lens - 1)
        if penalties is not None:
            mark_counted(penalties)
        new_seq_lens = window.prefix_lens + accepted.commit_lens
        clock.lap("accept")

        if batch.return_logprob:
            self._logprobs(batch, logits_output, choices, rows)
        if on_publish is not None:
            on_publish(new_seq_lens)
        wait, hidden = proposal.length == 0 and rows.width == 1, logits_output.hidden_states
        self._draft_context.add(
            requests,
            hidden.clone() if wait and target_out.can_run_cuda_graph else hidden,
            kv_plan.write_ids(self.draft_model_runner.kv_index_translator, cols=rows.columns),
            positions,
            wait=wait,
        )
        logits_output.hidden_states = None
        clock.lap("commit")

        result = self._result(target_out, accepted, rows, new_seq_lens)
        if self._policy.learns:
            self._learn(requests, proposal, rows, accepted, gap)
        clock.lap("result")
        if self._trace is not None:
            self._trace.round(
                requests=requests,
                verified=rows.lens,
                gained=accepted.commit_lens.tolist(),
                context=window.prefix_lens.tolist(),
                confidence=proposal.confidence.tolist(),
                laps=clock.laps,
                gap=gap,
            )
        return result

    def _open_window(self, batch: ScheduleBatch):
        """The slots this round may write: [bs, W] from each request's committed length on."""
        bs, width = len(batch.reqs), self._window_width
        prefix = batch.seq_lens
        positions = torch.empty((bs, width), dtype=torch.int64, device=prefix.device)
        kv_plan = self.model_runner.kv_index_translator.plan_uniform_extend(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix,
            seq_lens_cpu=(
                batch.seq_lens_cpu
                if batch.seq_lens_cpu is not None
                else batch.spec_info.nxt_kv_lens_cpu
            ),
            width=width,
            positions_out=positions,
        )
        # Draft positions past the context are never verified; keep them inside the rotary table.
        positions.clamp_(max=self._context_len - 1)
        return Window(batch.spec_info.bonus_tokens, prefix, positions), kv_plan

    def _first_drafts(self, requests: list[str], caps: torch.Tensor) -> list[int]:
        """Tokens the first pass drafts per request; the same on every rank."""
        bs, most = len(requests), self._window_width - 1
        if self._full_rows:
            return [most] * bs
        if self._draft_is_captured:  # one width, the window; none where none is wanted
            lengths = [most if self._policy.first_draft(requests, most) else 0] * bs
        elif self._on_device:  # a look at the caps would stall it; the window bounds them
            lengths = [self._policy.first_draft(requests, most)] * bs
        else:
            lengths = self._policy.first_drafts(requests, caps.tolist())
        if self._tp_group.world_size > 1:
            shared = torch.tensor(lengths)
            group = self._tp_group
            torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
            lengths = shared.tolist()
        return lengths

    def _propose(self, batch, window: Window, kv_plan, lengths: list[int]) -> Proposal:
        if not any(lengths):
            return Proposal.none(len(batch.reqs), window.anchor.device)
        self._draft_context.flush()
        want = self._policy.needs_confidence or self._trace is not None
        return self._drafter.propose(batch, window, kv_plan, lengths, confidence=want)

    def _decide(
        self, proposal: Proposal, caps: torch.Tensor, alpha, window: Window
    ) -> tuple[list[int], list[int] | None]:
        """Rows each request verifies, anchor included, on the host, where the layout needs them.

        With them, in the one look at the device that a round takes, the tokens each request has so
        far, if rounds replay graphs.
        """
        committed = window.prefix_lens if self._target.captured else None
        if self._full_rows:
            return [self._window_width] * int(caps.shape[0]), None
        if proposal.length == 0:
            ones = [1] * int(caps.shape[0])
            return ones, None if committed is None else committed.tolist()
        lengths = self._policy.decide(proposal.confidence, caps, alpha)
        # A policy may be wrong about what pays, never about what is allowed.
        lengths = torch.minimum(lengths, caps).clamp_(min=0) + 1
        self._broadcast(lengths)
        if committed is None:
            return lengths.tolist(), None
        lens, tokens = torch.stack([lengths.to(committed.dtype), committed]).tolist()
        return lens, tokens

    def _broadcast(self, values: torch.Tensor) -> None:
        """Rank 0 decides; ranks that disagree by a rounding error would hang."""
        if self._tp_group.world_size > 1:
            self._tp_group.broadcast(values, src=0)

    def _logprobs(self, batch, logits_output, choices: torch.Tensor, rows: VerifyRows) -> None:
        """Target logprobs of every output token, from the row that chose it."""
        row = torch.arange(rows.total, device=choices.device)
        index = rows.spread(row, self._window_width, fill=0)
        compute_spec_logprobs(batch, logits_output, choices, accept_index=index)

    def _result(
        self, target_out, accepted: Accepted, rows: VerifyRows, new_seq_lens: torch.Tensor
    ) -> GenerationBatchResult:
        return GenerationBatchResult(
            logits_output=target_out.logits_output,
            next_token_ids=accepted.tokens.reshape(-1).clamp_(min=0),
            accept_lens=accepted.commit_lens,
            cap_lens=torch.tensor(rows.lens, dtype=torch.int32),
            can_run_cuda_graph=target_out.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self._window_width,
            new_seq_lens=new_seq_lens,
            routed_experts_output=target_out.routed_experts_output,
            indexer_topk_output=target_out.indexer_topk_output,
        )

    def _learn(
        self,
        requests: list[str],
        proposal: Proposal,
        rows: VerifyRows,
        accepted: Accepted,
        gap: float | None,
    ) -> None:
        """Tell the policy what the round brought and what it cost."""
        laps, bs = self._clock.laps, len(requests)
        outcome = Outcome.of(requests, proposal.confidence, rows.lens, accepted.commit_lens)
        if not self._learns_late:
            outcome.teach(self._policy)
        elif proposal.length:
            self._unlearnt = outcome
        due = self._clock.rounds % REPORT_EVERY == 0 and self._tp_group.rank_in_group == 0
        if due and (learnt := self._policy.report()):
            logger.info("LibraSpec: after %d rounds: %s", self._clock.rounds, learnt)
        if not self._host_timed:
            return
        outside = laps["window"] + laps["layout"]
        self._policy.learn_times(
            RoundTimes(
                batch=bs,
                draft_rows=proposal.rows,
                draft_seconds=laps["draft"] + laps["decide"],
                verify_rows=rows.total,
                verify_seconds=laps["verify"] + laps["accept"] + laps["commit"],
                elsewhere=None if gap is None else gap + outside,
            )
        )

    # -- saying what happens -------------------------------------------------------------

    def _open_trace(self, block_size: int, circumstances: dict[str, str]) -> TraceWriter | None:
        if self._options.trace is None or self._tp_group.rank_in_group != 0:
            return None
        return TraceWriter(
            self._options.trace,
            {
                "policy": self._policy.name,
                "block_size": block_size,
                "window": self._window_width,
                **circumstances,
            },
        )

    def _rows_in_words(self) -> str:
        """How decided lengths are verified."""
        if self._full_rows:
            return "whole window"
        if self._target.captured:
            return self.model_runner.decode_cuda_graph_runner.in_words()
        return "ragged"
