"""The target's choice at every verified row, made exactly as plain decoding would make it.

Sampling goes through the target's own SGLang sampler with each request's parameters repeated over
its rows, so temperature, top-k, top-p, min-p and per-request seeds (which SGLang hashes with the
token's position) mean what they mean without speculation.

Transforms that depend on the tokens generated so far (penalties, grammar, custom logit processors)
are valid at the anchor's row only; a request that uses one verifies no drafted token, and its one
row is transformed by SGLang's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils import DynamicGradMode

from libraspec_sglang.upload import upload

from .layout import VerifyRows, verify_rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator


def depends_on_path(req: Req) -> bool:
    """Whether the request's logits depend on tokens between its anchor and the row."""
    p = req.sampling_params
    return (
        req.grammar is not None
        or req.custom_logit_processor is not None
        or p.frequency_penalty != 0.0
        or p.presence_penalty != 0.0
        or p.repetition_penalty != 1.0
        or p.min_new_tokens > len(req.output_ids)
    )


def adjust_logits(
    logits: torch.Tensor,
    sampling_info: SamplingBatchInfo | None,
    rows: VerifyRows,
    path_dependent: Sequence[int],
    penalties: BatchedPenalizerOrchestrator | None,
    grammar_barrier: Callable[[], None] | None,
) -> None:
    """Apply bias, penalties, grammar masks and custom processors in place.

    Args:
        logits: [T, V] of the verified rows.
        rows: layout of the T rows.
        path_dependent: requests of the batch for which :func:`depends_on_path` holds; each has
            one row.
        penalties: the batch's penalties, up to date with the anchors, or None.
        grammar_barrier: brings grammars up to date with the previous round (overlap scheduling).
    """
    if sampling_info is None:
        return
    if path_dependent:
        if grammar_barrier is not None:
            grammar_barrier()
        sampling_info.update_regex_vocab_mask()
        # Under overlap scheduling SGLang hands over penalties summed up before the anchors were
        # known, in place of the object that keeps count; without it, the object itself.
        stale = sampling_info.penalizer_orchestrator is None
        sampling_info.acc_additive_penalties = sampling_info.acc_scaling_penalties = None
        own = upload(torch.tensor(path_dependent), logits.device)
        first = torch.searchsorted(rows.request, torch.arange(len(rows.lens), device=logits.device))
        anchors = logits[first]
        if stale and penalties is not None:
            penalties.apply(anchors)
        sampling_info.apply_logits_bias(anchors)
        sampling_info.grammar_mask = None
        if sampling_info.has_custom_logit_processor:
            apply_custom_logit_processor(anchors, sampling_info)
    if sampling_info.logit_bias is not None:
        logits.add_(sampling_info.logit_bias.to(logits.dtype)[rows.request])
    if path_dependent:
        logits[first[own]] = anchors[own]


def choose(
    logits: torch.Tensor,
    sampling_info: SamplingBatchInfo | None,
    rows: VerifyRows,
    positions: torch.Tensor,
    sampler: Callable[..., torch.Tensor],
    *,
    keep_logits: bool,
) -> torch.Tensor:
    """The target's token at every row.

    Args:
        logits: [T, V], already adjusted; overwritten when sampling unless ``keep_logits``.
        positions: int64 [T], position of each row's input token.
        sampler: the target's ``Sampler``.
        keep_logits: the caller still needs the logits (logprobs).

    Returns:
        int64 [T].
    """
    if sampling_info is None or sampling_info.is_all_greedy:
        return logits.argmax(dim=-1)
    output = LogitsProcessorOutput(next_token_logits=logits.clone() if keep_logits else logits)
    chosen = sampler(
        output,
        _per_row(sampling_info, rows),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=positions,
    )
    return chosen.to(torch.int64)


def prepare_seeded(sampler: Callable[..., torch.Tensor], vocab_size: int, device: str) -> None:
    """Let SGLang compile its seeded sampling, once for one row and once for several.

    Else the first rounds that sample wait for it (seconds); without drafted tokens a server with
    one request at a time never has several rows.
    """
    for rows in (1, 2):
        ones = torch.ones(rows, device=device)
        info = SamplingBatchInfo(
            temperatures=ones[:, None],
            top_ps=ones,
            top_ks=torch.full((rows,), vocab_size, dtype=torch.int32, device=device),
            min_ps=torch.zeros_like(ones),
            is_all_greedy=False,
            is_any_greedy=False,
            need_top_p_sampling=False,
            need_top_k_sampling=False,
            need_min_p_sampling=False,
            vocab_size=vocab_size,
            sampling_seed=torch.zeros(rows, dtype=torch.int64, device=device),
            device=device,
        )
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        logits = torch.zeros((rows, vocab_size), device=device)
        with DynamicGradMode():  # what a compiled function was compiled under counts
            plain = verify_rows([1] * rows, 1, device)
            choose(logits, info, plain, positions, sampler, keep_logits=False)


def _per_row(info: SamplingBatchInfo, rows: VerifyRows) -> SamplingBatchInfo:
    """The batch's sampling parameters, one entry per row; transforms already applied are off."""

    def repeat(value: Any) -> Any:
        return value if value is None or rows.width == 1 else value[rows.request]

    return replace(
        info,
        temperatures=repeat(info.temperatures),
        top_ps=repeat(info.top_ps),
        top_ks=repeat(info.top_ks),
        min_ps=repeat(info.min_ps),
        sampling_seed=repeat(info.sampling_seed),
        grammars=None,
        grammar_mask=None,
        logit_bias=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
    )
