"""FlashInfer's host code allocates on CPU and takes the device for an sm_80.

Why: its wrappers pin memory, name the device "cuda", and ask a CUDA device for its compute
capability. sm_80 makes ``backend="auto"`` choose fa2, whose call signature our twins have.
Where: the ``torch`` and ``get_compute_capability`` globals of ``flashinfer.prefill``, ``.decode``
and ``.utils`` (FlashInfer 0.7.2).
Undo: the globals are put back.
"""

from __future__ import annotations

from libraspec_sglang.cpu.torch_proxy import TorchOnCpu
from libraspec_sglang.patches._base import Swap

_swap = Swap()


def _sm80(_device) -> tuple[int, int]:
    return (8, 0)


def apply() -> None:
    if _swap.applied:
        return
    import flashinfer.decode
    import flashinfer.prefill
    import flashinfer.utils

    for module in (flashinfer.prefill, flashinfer.decode):
        _swap.attribute(module, "torch", TorchOnCpu())
    for module in (flashinfer.prefill, flashinfer.decode, flashinfer.utils):
        _swap.attribute(module, "get_compute_capability", _sm80)


def undo() -> None:
    _swap.undo()
