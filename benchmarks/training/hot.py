"""Hot tokens: the part of a large vocabulary a drafter proposes from.

On a small target the language-model head is most of a draft pass. Text uses few of its rows,
so the drafter multiplies by those alone; a token outside the list is never drafted, and
verification produces it as usual. The list is chosen before training, since confidences are
probabilities among the hot tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .store import Store


def token_counts(store: Store, vocab: int) -> tuple[Tensor, Tensor]:
    """Occurrences `[vocab]` in answers, and in prompts and the target's candidates."""
    answers = torch.zeros(vocab, dtype=torch.long)
    nearby = torch.zeros(vocab, dtype=torch.long)
    for row in range(len(store)):
        seq = store[row]
        answers += seq.ids[seq.prompt_len :].bincount(minlength=vocab)
        nearby += seq.ids[: seq.prompt_len].bincount(minlength=vocab)
        likely = seq.top_ids[seq.top_probs > 0.02]
        nearby += likely.bincount(minlength=vocab)
    return answers, nearby


def choose_hot(store: Store, vocab: int, size: int | None) -> Tensor | None:
    """The `size` hottest token ids, sorted; None if the vocabulary is small or `size` is 0.

    Ranked by occurrences in answers, then in prompts and candidates, then by id: byte-pair
    vocabularies list frequent merges first.
    """
    if not size or size >= vocab:
        return None
    answers, nearby = token_counts(store, vocab)
    score = answers.double() * 1e6 + nearby.double() - torch.arange(vocab) / (10.0 * vocab)
    return score.topk(size).indices.sort().values


def coverage(store: Store, hot: Tensor, vocab: int) -> float:
    """Share of answer tokens that are hot."""
    answers, _ = token_counts(store, vocab)
    return float(answers[hot].sum() / answers.sum())
