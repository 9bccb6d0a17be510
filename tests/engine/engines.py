"""Engines for tests: a process each, over the shipped byte pair or a crafted tiny one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from libraspec_sglang.demo.pairs import HERE
from libraspec_sglang.demo.runner import EngineProcess

TARGET, DRAFTER = HERE / "bytes-target", HERE / "bytes-dflash"


@contextmanager
def engine(
    logs: Path,
    name: str,
    *,
    algorithm: str | None = "LIBRASPEC",
    options: dict[str, Any] | None = None,
    target: Path = TARGET,
    drafter: Path = DRAFTER,
    **arguments: Any,
) -> Iterator[EngineProcess]:
    """Start one engine; float32 and overlap off unless told otherwise."""
    given: dict[str, Any] = {
        "model_path": str(target),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_total_tokens": 24000,
        "max_running_requests": 16,
        "disable_overlap_schedule": True,
        "log_level": "info",
        "sleep_on_idle": True,  # several live at once; one that waits must not take a core
        **arguments,
    }
    if algorithm is not None:
        given["speculative_algorithm"] = algorithm
        given["speculative_draft_model_path"] = str(drafter)
    with EngineProcess(name, given, options or {}, logs / f"{name}.log") as process:
        process.wait_ready()
        yield process


def limited(
    prompts: list[list[int]], lengths: Sequence[int], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Greedy requests that verify at most ``lengths[i]`` drafted tokens a round, in turn."""
    return [
        {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_new_tokens,
                "custom_params": {"libraspec_max_length": lengths[i % len(lengths)]},
            },
        }
        for i, prompt in enumerate(prompts)
    ]


def encode(texts: list[str], room: int = 600) -> list[list[int]]:
    """Bytes are token ids."""
    return [list(text.encode())[-room:] for text in texts]
