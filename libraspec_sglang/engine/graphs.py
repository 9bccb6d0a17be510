"""CUDA graphs for verifications of unequal lengths: which are captured, and when that works.

SGLang's runner captures one graph per batch size and replays it for batches that verify the whole
window; its ragged mode adds tiers of rows, as many as there are batch sizes and none below a whole
window. The subclass here captures a tier about every fifth of the rows (:mod:`..verify.tiers`), so
that a batch of one pays for what it verifies too. A tier serves any number of requests that fit.
"""

from __future__ import annotations

from typing import Any

import tqdm
from sglang.srt.compilation import torch_compile_decoration
from sglang.srt.environ import envs
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
    resolve_attention_backend_strs,
)
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

from libraspec_sglang import options
from libraspec_sglang.verify import flashinfer
from libraspec_sglang.verify.layout import ragged_layout, verify_rows
from libraspec_sglang.verify.tiers import tier_of, token_tiers

from . import algorithm


class RaggedGraphRunner(DecodeCudaGraphRunner):
    """Captures the target's verification by tiers of rows."""

    def __init__(self, model_runner, **kwargs: Any) -> None:
        # SGLang asks its environment whether graphs are ragged; other parts ask too, and must not
        # be told so.
        with envs.SGLANG_RAGGED_VERIFY_MODE.override("compact"):
            super().__init__(model_runner, **kwargs)

    def tier(self, requests: int, rows: int) -> int | None:
        """Rows of the graph that takes such a batch; None where none does and it runs eagerly."""
        return tier_of(rows, self.capture_num_tokens) if requests <= self.max_bs else None

    def in_words(self) -> str:
        """What is captured, and the device memory that all tiers share."""
        tiers, mib = self.capture_num_tokens, self.attn_backend.graph_state_bytes() / 2**20
        return f"ragged in {len(tiers)} graphs to {tiers[-1]} rows (tables: {mib:.0f} MiB)"

    def _build_ragged_verify_token_buckets(self) -> list[int]:
        return token_tiers(self.max_bs * self.captured_req_width)

    def _capture_one_stream(self, stream_idx: int | None = None) -> None:
        for tokens in tqdm.tqdm(
            self.capture_num_tokens[::-1],  # the largest first: the others reuse its memory
            desc="Capturing verifications",
            unit="tier",
            disable=get_parallel().tp_rank != 0,
        ):
            with torch_compile_decoration.patch_model(
                self.model_runner.model,
                False,
                num_tokens=tokens,
                tp_group=get_parallel().tp_group,
            ) as forward:
                self.capture_one_shape(tokens, forward, stream_idx)

    def capture_one_shape(self, size: int, *args: Any, **kwargs: Any) -> None:
        """Capture the pass over ``size`` rows: in SGLang's words, so many requests of one row."""
        width, self.captured_req_width = self.captured_req_width, 1
        try:
            super().capture_one_shape(size, *args, **kwargs)
        finally:
            self.captured_req_width = width

    def _capture_ragged_verify_layout(self, num_tokens: int) -> RaggedVerifyLayout:
        slots = self._ragged_capture_slots(num_tokens)
        width = -(-num_tokens // slots)
        lens = build_capture_verify_lens(
            num_tokens=num_tokens, num_slots=slots, num_draft_tokens=width
        )
        return ragged_layout(verify_rows(lens, width, self.device))

    def _stage_ragged_verify_layout(self, ragged_layout, graph_size_key: int) -> None:
        """Nothing that is captured here reads a layout; FlashInfer's plan says it all."""


def obstacle(runner) -> str | None:
    """Why this model runner's verifications cannot be captured ragged; None if they can."""
    if runner.use_mla_backend:
        return "the target uses multi-head latent attention"
    if runner.sliding_window_size is not None:
        return "the target has sliding-window layers"
    if runner.model_config.is_encoder_decoder:
        return "the target has an encoder"
    if runner.model_config.model_is_mrope:
        return "the target has multimodal rotary positions, which SGLang keeps by request"
    backends = resolve_attention_backend_strs(model_runner=runner)
    for backend in (backends.prefill, backends.decode):
        if backend != flashinfer.NAME:
            return f"the attention backend is {backend}, not FlashInfer"
    if get_exec().overlap.enable_two_batch_overlap:
        return "--enable-two-batch-overlap splits batches by request"
    if get_disagg().enable_pdmux:
        return "--enable-pdmux keeps several attention backends"
    if get_exec().graph.disable_cuda_graph_padding:
        return "--disable-cuda-graph-padding leaves no tiers to pad to"
    return None


def wanted(runner) -> bool:
    """Whether this is a LIBRASPEC target whose verifications will be captured by tiers."""
    return (
        options.load().graphs == "ragged"
        and isinstance(runner.spec_algorithm, algorithm.LibraSpecAlgorithm)
        and not runner.is_draft_worker
        and obstacle(runner) is None
    )
