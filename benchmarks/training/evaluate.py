"""Acceptance and calibration of a drafter, from the target's recorded greedy answers.

Under greedy decoding the target's text does not depend on the drafter, so a recorded answer
can be replayed: draft at every position, then walk the rounds a server would have run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .drafter import Drafter
from .store import Sequence

BINS = 10


@dataclass
class Rounds:
    """Rounds of one kind of prompt.

    `accepted`: drafted tokens accepted per round; `confidence` and `correct`: for every
    position that was reached (its prefix accepted), by position from 1.
    """

    accepted: list[int] = field(default_factory=list)
    confidence: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    correct: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))

    def merge(self, other: Rounds) -> None:
        self.accepted += other.accepted
        for k in other.confidence:
            self.confidence[k] += other.confidence[k]
            self.correct[k] += other.correct[k]


class Head:
    """The target's embedding and head, the head restricted to hot tokens if given."""

    def __init__(self, embedding: Tensor, head: Tensor, hot: Tensor | None = None) -> None:
        self.embedding = embedding.detach().float()
        self.hot = torch.arange(len(head)) if hot is None else hot
        self.weight = head.detach().float()[self.hot].contiguous()
        self.slot = torch.full((len(head),), -1)  # token id to row of `weight`, -1 if not hot
        self.slot[self.hot] = torch.arange(len(self.hot))


@torch.no_grad()
def draft(drafter: Drafter, head: Head, seq: Sequence, block_size: int,
          chunk: int = 32) -> tuple[Tensor, Tensor]:
    """Draft at every answer token: tokens and confidences `[N - prompt_len - 1, n - 1]`.

    Row r has its anchor at position `prompt_len + r`.
    """
    mask_embed = head.embedding[drafter.cfg.mask_token_id]
    features = seq.features.float().unsqueeze(0)
    tokens, confidences = [], []
    anchors = torch.arange(seq.prompt_len, len(seq.ids) - 1)
    for part in anchors.split(chunk):
        seen = features[:, : int(part[-1])]
        hidden = drafter(seen, part[None], head.embedding[seq.ids[part]][None], mask_embed,
                         block_size)
        probs = (hidden[0, :, 1:] @ head.weight.T).softmax(dim=-1)
        confidence, best = probs.max(dim=-1)
        tokens.append(head.hot[best])
        confidences.append(confidence)
    return torch.cat(tokens), torch.cat(confidences)


def walk(tokens: Tensor, confidences: Tensor, seq: Sequence) -> Rounds:
    """Rounds of greedy decoding over drafts made at every position."""
    rounds = Rounds()
    answer = seq.ids[seq.prompt_len :]
    row, last = 0, len(answer) - 1
    while row < last:
        truth = answer[row + 1 : row + 1 + tokens.shape[1]]
        right = tokens[row, : len(truth)] == truth
        accepted = int(right.long().cumprod(0).sum())
        for k in range(min(accepted + 1, len(truth))):
            rounds.confidence[k + 1].append(float(confidences[row, k]))
            rounds.correct[k + 1].append(bool(right[k]))
        if accepted < len(truth) or len(truth) == tokens.shape[1]:  # not cut by the answer's end
            rounds.accepted.append(accepted)
        row += accepted + 1
    return rounds


def calibration_error(confidence: Tensor, correct: Tensor) -> float:
    """Expected calibration error over ten equal bins."""
    if not len(confidence):
        return float("nan")
    bins = (confidence * BINS).long().clamp_max(BINS - 1)
    error = 0.0
    for b in range(BINS):
        inside = bins == b
        if inside.any():
            gap = confidence[inside].mean() - correct[inside].mean()
            error += float(inside.float().mean() * gap.abs())
    return error


def summary(rounds: Rounds) -> dict[str, Any]:
    """tau (accepted + 1 per round), acceptance given the prefix, calibration."""
    positions = sorted(rounds.confidence)
    confidence = torch.tensor([c for k in positions for c in rounds.confidence[k]])
    correct = torch.tensor([float(c) for k in positions for c in rounds.correct[k]])
    bins = (confidence * BINS).long().clamp_max(BINS - 1)
    accepted = torch.tensor(rounds.accepted)
    return {
        "rounds": len(rounds.accepted),
        "tau": round(float(accepted.float().mean()) + 1, 3),
        "accept_by_position": [
            round(sum(rounds.correct[k]) / len(rounds.correct[k]), 3) for k in positions
        ],
        "reached_by_position": [len(rounds.correct[k]) for k in positions],
        "ece": round(calibration_error(confidence, correct), 4),
        "ece_by_position": [
            round(calibration_error(torch.tensor(rounds.confidence[k]),
                                    torch.tensor(rounds.correct[k]).float()), 3)
            for k in positions
        ],
        "calibration": [
            [round(float(confidence[bins == b].mean()), 3),
             round(float(correct[bins == b].mean()), 3), int((bins == b).sum())]
            for b in range(BINS) if (bins == b).any()
        ],
        "accepted_histogram": torch.bincount(accepted).tolist() if len(accepted) else [],
    }


def evaluate(drafter: Drafter, head: Head, sequences: Iterable[Sequence],
             block_size: int) -> dict[str, Any]:
    """Summaries by kind, overall, and the plain mean of the kinds' tau."""
    drafter.eval()
    by_kind: dict[int, Rounds] = defaultdict(Rounds)
    for seq in sequences:
        if len(seq.ids) - seq.prompt_len >= 2:
            by_kind[seq.kind].merge(walk(*draft(drafter, head, seq, block_size), seq))
    total = Rounds()
    for rounds in by_kind.values():
        total.merge(rounds)
    kinds = {kind: summary(by_kind[kind]) for kind in sorted(by_kind)}
    return {
        "block_size": block_size,
        "mean_tau": round(sum(s["tau"] for s in kinds.values()) / len(kinds), 3),
        "all": summary(total),
        "kinds": kinds,
    }
