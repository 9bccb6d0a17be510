"""FlashInfer's compiled modules are replaced by torch twins instead of being built with nvcc.

Why: it is the narrowest seam. Wrappers, planning and mask packing stay FlashInfer's own Python.
Where: ``flashinfer.jit.core.JitSpec.build_and_load`` (FlashInfer 0.7.2).
Undo: the method is put back; modules FlashInfer has cached meanwhile stay in its caches.
"""

from __future__ import annotations

from libraspec_sglang.cpu import flashinfer_leaves
from libraspec_sglang.patches._base import Swap

_swap = Swap()


def apply() -> None:
    if _swap.applied:
        return
    from flashinfer.jit.core import JitSpec

    _swap.attribute(JitSpec, "build_and_load", flashinfer_leaves.module_for)


def undo() -> None:
    _swap.undo()
