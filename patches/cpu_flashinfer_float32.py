"""FlashInfer accepts float32 queries and caches.

Why: exact comparisons (speculative against plain decoding, one backend against another) need
float32; in bfloat16 near-ties flip. FlashInfer's tables only name what its CUDA kernels serve, and
they name files here, never code.
Where: ``flashinfer.jit.utils`` dtype tables (FlashInfer 0.7.2).
Undo: the entries are removed.
"""

from __future__ import annotations

import torch

from libraspec_sglang.patches._base import Swap

_swap = Swap()


def apply() -> None:
    if _swap.applied:
        return
    from flashinfer.jit import utils

    for table, name in (
        (utils.dtype_map, "float"),
        (utils.dtype_map_kv, "float"),
        (utils.filename_safe_dtype_map, "f32"),
    ):
        _swap.item(table, torch.float32, name)


def undo() -> None:
    _swap.undo()
