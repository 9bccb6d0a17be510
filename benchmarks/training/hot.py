"""Hot tokens: the part of a large vocabulary a drafter proposes from.

On a small target the language-model head is most of a draft pass. Text uses few of its rows,
so the drafter multiplies by those alone; a token outside the list is never drafted, and
verification produces it as usual. The list is chosen before training, since confidences are
probabilities among the hot tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

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


def text_counts(files: Iterable[Path], target: Path, vocab: int) -> Tensor:
    """Occurrences `[vocab]` in the prompts of JSONL files, answered or not."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    counts = torch.zeros(vocab, dtype=torch.long)
    for file in files:
        for line in Path(file).read_text().splitlines():
            row = json.loads(line)
            texts = row.get("turns") or [row.get("prompt") or row["text"]]
            for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
                counts += torch.tensor(ids, dtype=torch.long).bincount(minlength=vocab)
    return counts


def choose_hot(store: Store, vocab: int, size: int | None,
               text: Tensor | None = None) -> Tensor | None:
    """The `size` hottest token ids, sorted; None if the vocabulary is small or `size` is 0.

    Ranked by occurrences in answers, then in prompts, candidates and `text` (counts
    `[vocab]` of further text), then by id: byte-pair vocabularies list frequent merges first.
    """
    if not size or size >= vocab:
        return None
    answers, nearby = token_counts(store, vocab)
    if text is not None:
        nearby = nearby + text
    score = answers.double() * 1e6 + nearby.double() - torch.arange(vocab) / (10.0 * vocab)
    return score.topk(size).indices.sort().values


def coverage(store: Store, hot: Tensor, vocab: int) -> float:
    """Share of answer tokens that are hot."""
    answers, _ = token_counts(store, vocab)
    return float(answers[hot].sum() / answers.sum())
