"""Every change to the behaviour of SGLang, FlashInfer or torch, one small module each.

A patch module says in its docstring what it changes, why, for which versions, whether upstream
knows, and how it is undone, and exposes ``apply()`` and ``undo()``, both idempotent.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

EVERYWHERE = ("request_row_width",)
"""Patches that LIBRASPEC needs on any device."""

CPU = (
    "cpu_record_stream",
    "cpu_no_nccl",
    "cpu_flashinfer_modules",
    "cpu_flashinfer_float32",
    "cpu_flashinfer_host",
    "cpu_flashinfer_backend",
    "cpu_kv_indices",
    "cpu_last_loc",
    "cpu_default_backend",
    "cpu_dflash_device",
    "cpu_dflash_rope",
    "cpu_input_embeds_dtype",
    "cpu_seeded_sampling",
    "cpu_graphs",
    "cpu_call_counters",
)
"""Patches of the CPU runtime, in the order they must be applied."""


def apply_all(names: Iterable[str]) -> list[str]:
    """Apply patches by module name, in order; returns the names applied."""
    done = []
    for name in names:
        importlib.import_module(f"{__name__}.{name}").apply()
        done.append(name)
    return done


def undo_all(names: Iterable[str]) -> None:
    """Undo patches by module name, last first."""
    for name in reversed(list(names)):
        importlib.import_module(f"{__name__}.{name}").undo()
