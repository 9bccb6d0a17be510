"""The model pairs by name: `real` (SmolLM2 and its drafter) and `test` (byte-level)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .smollm2 import ensure_target

HERE = Path(__file__).resolve().parent
NAMES = ("real", "test")


@dataclass(frozen=True)
class Pair:
    """A target, its drafter, and how to prompt them."""

    name: str
    target: Path
    drafter: Path
    chat: bool  # prompts go through the target's chat template
    stop: tuple[str, ...]  # where an answer ends, besides the tokenizer's end token
    block_size: int  # the drafter's native block
    mask_token_id: int


def resolve(name: str) -> Pair:
    """The pair called `name`. `real` fetches its target on first use (network, 93 MB)."""
    if name == "real":
        return Pair(
            name="real",
            target=ensure_target(),
            drafter=HERE / "smollm2-135m-dflash",
            chat=True,
            stop=("<|im_end|>",),
            block_size=8,
            mask_token_id=15,
        )
    if name == "test":
        return Pair(
            name="test",
            target=HERE / "bytes-target",
            drafter=HERE / "bytes-dflash",
            chat=True,
            stop=(),
            block_size=16,
            mask_token_id=258,
        )
    raise ValueError(f"unknown pair {name!r}; choose one of {', '.join(NAMES)}")
