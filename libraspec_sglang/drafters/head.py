"""The draft head: from draft hidden states to a token and the probability it was given.

DFlash drafts borrow the target's ``lm_head``. Two things differ from SGLang's own greedy head:
the probability of the chosen token is kept, since it is what lengths are decided from, and the
vocabulary may be cut to the *hot* tokens the checkpoint lists (``hot_token_ids.json``). A cut
vocabulary is lossless, since the target verifies every token; it saves most of the head's cost
where the vocabulary is large and the drafter small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from libraspec_sglang.kernels import length_controller


@dataclass(frozen=True)
class DraftHead:
    """Greedy draft tokens with confidences.

    Attributes:
        project: [n, H] hidden states -> [n, V'] logits over this rank's candidate tokens.
        token_ids: int64 [V'], token id of each logit column.
        group: tensor-parallel group whose ranks hold other columns, or None.
    """

    project: Any
    token_ids: torch.Tensor
    group: Any = None

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor, *, confidence: bool) -> tuple[torch.Tensor, Any]:
        """Draft from hidden states.

        Args:
            hidden: [n, H].
            confidence: whether to also return probabilities (one more pass over the logits).

        Returns:
            (int64 [n] tokens, float32 [n] probability of each under the drafter, or None).
        """
        logits = self.project(hidden)
        column, chance = _best(logits, confidence)
        token = self.token_ids[column]
        if self.group is None:
            return token, chance
        return self._across_ranks(logits.gather(-1, column[:, None])[:, 0].float(), token, chance)

    def _across_ranks(self, best: torch.Tensor, token: torch.Tensor, chance: torch.Tensor | None):
        """The best of all ranks; ties go to the lowest rank, as a full-vocabulary argmax would."""
        gather = self.group.all_gather
        scores = gather(best[None], dim=0)
        winner = scores.argmax(dim=0, keepdim=True)
        token = gather(token[None], dim=0).gather(0, winner)[0]
        if chance is None:
            return token, None
        mass = torch.logsumexp(gather((best - chance.log())[None], dim=0), dim=0)
        return token, torch.exp(scores.gather(0, winner)[0] - mass)


def _best(logits: torch.Tensor, confidence: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(column int64 [n] of each row's largest logit, its float32 probability if wanted)."""
    if not confidence:
        return logits.argmax(dim=-1), None
    if length_controller.on_device(logits.device):
        return length_controller.confidences(logits)
    best, column = logits.max(dim=-1)
    return column, torch.exp(best.float() - torch.logsumexp(logits.float(), dim=-1))


def build_head(lm_head: Any, vocab_size: int, hot_ids: list[int] | None, group: Any) -> DraftHead:
    """Borrow the target's head.

    Args:
        lm_head: the target's (vocabulary-parallel) head; dense weight or quantised.
        vocab_size: the target's vocabulary; padding and added rows beyond it are never drafted.
        hot_ids: sorted token ids to draft from, or None for all of them.
        group: tensor-parallel group, or None on one rank.

    Raises:
        ValueError: the head has neither a dense weight nor a quantisation method.
    """
    shard = getattr(lm_head, "shard_indices", None)
    first = int(shard.org_vocab_start_index) if shard is not None else 0
    rows = int(shard.num_org_elements) if shard is not None else int(lm_head.weight.shape[0])
    rows = min(rows, vocab_size - first)
    weight = getattr(lm_head, "weight", None)
    dense = weight is not None and weight.dtype in _DENSE
    device = next(lm_head.parameters()).device
    columns = torch.arange(rows, device=device)
    if hot_ids is not None:
        hot = torch.tensor(hot_ids, device=device) - first
        columns = hot[(hot >= 0) & (hot < rows)]
    if dense:
        kept = weight[columns] if hot_ids is not None else weight[:rows]
        matrix = kept.detach().t()

        def project(hidden: torch.Tensor) -> torch.Tensor:
            return torch.matmul(hidden.to(matrix.dtype), matrix)

    elif callable(getattr(getattr(lm_head, "quant_method", None), "apply", None)):

        def project(hidden: torch.Tensor) -> torch.Tensor:
            return lm_head.quant_method.apply(lm_head, hidden, None)[:, columns]

    else:
        raise ValueError(
            "the target's lm_head has neither a dense weight nor a quantisation method; "
            "LIBRASPEC drafts through the target's head"
        )
    return DraftHead(project, columns + first, group)


_DENSE = (torch.float16, torch.bfloat16, torch.float32)
