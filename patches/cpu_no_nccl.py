"""Tensor parallel groups on CPU do without NCCL.

Why: SGLang opens a NCCL communicator for every group of more than one rank wherever the library
can be loaded, which torch's CUDA wheels see to, and then fails as there is no CUDA device. Its
collectives on CPU tensors use gloo, which is there in any case.
Where: ``distributed/device_communicators/pynccl.py`` of SGLang 0.5.23, which goes on without NCCL
when the library cannot be loaded. Undo: the library's class is put back.
"""

from __future__ import annotations

from libraspec_sglang.patches._base import Swap

_swap = Swap()


def apply() -> None:
    if _swap.applied:
        return
    from sglang.srt.distributed.device_communicators import pynccl

    _swap.attribute(pynccl, "NCCLLibrary", _unavailable)


def undo() -> None:
    _swap.undo()


def _unavailable(library_path: str | None = None) -> None:
    raise OSError("no NCCL on a CPU")
