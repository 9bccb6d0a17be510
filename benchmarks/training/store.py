"""Answers on disk: shards of safetensors that training can read while more are written.

A shard holds several answers back to back:
  ids `[sum N]`, features `[sum (N - 1), F]` bf16, top_ids / top_probs `[sum answer tokens, K]`,
  and per answer: length N, prompt_len, index (of its prompt), temperature, kind (file number).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .decode import Answer


@dataclass(frozen=True)
class Sequence:
    """One answer as the trainer sees it.

    ids `[N]`, features `[N - 1, F]`, top_ids / top_probs `[N - prompt_len, K]`.
    """

    ids: Tensor
    features: Tensor
    top_ids: Tensor
    top_probs: Tensor
    prompt_len: int
    temperature: float
    kind: int


def write_shard(folder: Path, answers: list[Answer], kinds: list[int]) -> Path:
    """Write the next shard of `folder`; it appears under its name only when complete."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"shard-{len(list(folder.glob('shard-*.safetensors'))):05d}.safetensors"
    tensors = {
        "ids": torch.cat([a.ids for a in answers]).int(),
        "features": torch.cat([a.features for a in answers]),
        "top_ids": torch.cat([a.top_ids for a in answers]).int(),
        "top_probs": torch.cat([a.top_probs for a in answers]).half(),
        "length": torch.tensor([len(a.ids) for a in answers]),
        "prompt_len": torch.tensor([a.prompt_len for a in answers]),
        "index": torch.tensor([a.index for a in answers]),
        "temperature": torch.tensor([a.temperature for a in answers]),
        "kind": torch.tensor(kinds),
    }
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.rename(path)
    return path


def done_indices(folder: Path) -> set[int]:
    """Prompt indices that have an answer in `folder`."""
    found: set[int] = set()
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, "pt") as shard:
            found.update(shard.get_tensor("index").tolist())
    return found


class Store:
    """Random access to the answers of one or several folders; features are read lazily."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.rows: list[tuple[Path, int, int, int, int, int, float, int]] = []
        self.open: dict[Path, safe_open] = {}
        self.seen: set[Path] = set()
        self.folders = [Path(folder) for folder in folders]
        self.refresh()

    def refresh(self) -> int:
        """Pick up shards written since; returns the number of answers."""
        for folder in self.folders:
            for path in sorted(folder.glob("shard-*.safetensors")):
                if path not in self.seen:
                    self._add(path)
        return len(self.rows)

    def _add(self, path: Path) -> None:
        self.seen.add(path)
        shard = self.open[path] = safe_open(path, "pt")
        columns = ("length", "prompt_len", "temperature", "kind")
        values = [shard.get_tensor(name).tolist() for name in columns]
        token = feature = answer = 0
        for length, prompt_len, temperature, kind in zip(*values, strict=True):
            self.rows.append((path, token, feature, answer, length, prompt_len, temperature, kind))
            token += length
            feature += length - 1
            answer += length - prompt_len

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def answer_tokens(self) -> int:
        return sum(row[4] - row[5] for row in self.rows)

    def __getitem__(self, index: int) -> Sequence:
        path, token, feature, answer, length, prompt_len, temperature, kind = self.rows[index]
        shard = self.open[path]
        spans = {
            "ids": (token, length), "features": (feature, length - 1),
            "top_ids": (answer, length - prompt_len), "top_probs": (answer, length - prompt_len),
        }
        parts = {
            name: shard.get_slice(name)[start : start + size]
            for name, (start, size) in spans.items()
        }
        return Sequence(
            ids=parts["ids"].long(), features=parts["features"], top_ids=parts["top_ids"].long(),
            top_probs=parts["top_probs"].float(), prompt_len=prompt_len,
            temperature=temperature, kind=kind,
        )
