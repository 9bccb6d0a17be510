"""The target's choice at every verified row, made exactly as plain decoding would make it.

Sampling goes through the target's own SGLang sampler with each request's parameters repeated over
its rows, so temperature, top-k, top-p, min-p and per-request seeds (which SGLang hashes with the
token's position) mean what they mean without speculation.

Transforms that depend on the tokens generated so far follow the drafted tokens: penalties
(:mod:`.penalties`) and grammars (:mod:`.grammar`). Custom logit processors read the request's
output, which ends before the anchor's row; a request that uses one verifies no drafted token, and
its one row is transformed by SGLang's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils import DynamicGradMode

from libraspec_sglang.upload import upload

from . import grammar
from .layout import VerifyRows, verify_rows
from .penalties import PenaltyWalk

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator


@dataclass(frozen=True)
class PathDependence:
    """Requests of a batch whose logits depend on the tokens before a row, by their places in it.

    Attributes:
        penalised: with penalties, or a ``min_new_tokens`` not reached yet.
        grammars: with a grammar.
        anchored: with a transform that cannot follow drafted tokens; they verify none.
    """

    penalised: list[int]
    grammars: dict[int, BaseGrammarObject]
    anchored: list[int]

    @classmethod
    def of(cls, requests: Sequence[Req]) -> PathDependence:
        return cls(
            [i for i, r in enumerate(requests) if _penalised(r)],
            {i: r.grammar for i, r in enumerate(requests) if r.grammar is not None},
            [
                i
                for i, r in enumerate(requests)
                if r.custom_logit_processor is not None
                or (r.grammar is not None and not grammar.walkable(r))
            ],
        )

    def drafted(self, tokens: torch.Tensor, rows: VerifyRows) -> dict[int, list[int]]:
        """On the host, the drafted tokens that grammars have to follow.

        Args:
            tokens: int64 [bs, D].
            rows: what is verified.
        """
        follow = [i for i in self.grammars if rows.lens[i] > 1 and i not in self.anchored]
        if not follow:
            return {}
        picked = tokens[upload(torch.tensor(follow), tokens.device), : rows.width - 1]
        return dict(zip(follow, picked.tolist(), strict=True))


def _penalised(req: Req) -> bool:
    p = req.sampling_params
    return (
        p.frequency_penalty != 0.0
        or p.presence_penalty != 0.0
        or p.repetition_penalty != 1.0
        or p.min_new_tokens > len(req.output_ids)
    )


def adjust_logits(
    logits: torch.Tensor,
    sampling_info: SamplingBatchInfo | None,
    rows: VerifyRows,
    path: PathDependence,
    drafted: torch.Tensor,
    followed: dict[int, list[int]],
    penalties: BatchedPenalizerOrchestrator | None,
    grammar_barrier: Callable[[], None] | None,
) -> PenaltyWalk | None:
    """Apply penalties, grammar masks, bias and custom processors in place, in SGLang's order.

    Args:
        logits: [T, V] of the verified rows.
        rows: layout of the T rows.
        path: requests whose logits depend on the tokens before a row.
        drafted: int64 [bs, D], drafted tokens, D >= rows.width - 1.
        followed: what ``path.drafted`` gave for this round.
        penalties: the batch's penalties, up to date with the anchors, or None.
        grammar_barrier: brings grammars up to date with the previous round (overlap scheduling).

    Returns:
        Where penalties were applied, their walk, to be told what was accepted.
    """
    if sampling_info is None:
        return None
    walk = None
    if path.penalised and penalties is not None:
        deepest = max(rows.lens[i] for i in path.penalised) - 1
        # Under overlap scheduling SGLang sums penalties up before it applies them, in plain
        # decoding too, and hands no object on; without it, the object applies one by one.
        summed = sampling_info.penalizer_orchestrator is None
        walk = PenaltyWalk(penalties, drafted, deepest, summed=summed)
        walk.apply(logits, rows, _marked(path.penalised, rows, logits.device))
    if path.grammars:
        if grammar_barrier is not None:
            grammar_barrier()
        mask = grammar.path_masks(
            path.grammars, followed, rows.lens, sampling_info.vocab_size, logits.device
        )
        if mask is not None:
            mask.apply(logits)
    if sampling_info.logit_bias is not None:
        logits.add_(sampling_info.logit_bias.to(logits.dtype)[rows.request])
    if sampling_info.has_custom_logit_processor:
        anchors = logits[rows.first]
        apply_custom_logit_processor(anchors, sampling_info)
        logits[rows.first] = anchors
    return walk


def _marked(places: Sequence[int], rows: VerifyRows, device: torch.device) -> torch.Tensor:
    """bool [bs], true at ``places``."""
    marks = np.zeros(len(rows.lens), dtype=bool)
    marks[list(places)] = True
    return upload(marks, device)


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
