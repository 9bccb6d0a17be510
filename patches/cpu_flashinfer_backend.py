"""SGLang's own FlashInfer attention backend can be constructed on CPU.

Why: ``flashinfer_backend`` imports FlashInfer only where ``is_flashinfer_available()``, which wants
CUDA. The answer is True only while that one module executes, so that layernorm, sampling and
quantization keep their CPU paths. The module also allocates on "cuda" by name, hence the proxy.
Where: ``sglang.srt.layers.attention.flashinfer_backend`` (SGLang 0.5.23).
Undo: its ``torch`` is put back. The names imported from FlashInfer stay; without the other patches
they fail when used, as they would on any machine without a GPU.
"""

from __future__ import annotations

import importlib
import sys
import types

from libraspec_sglang.cpu.torch_proxy import TorchOnCpu
from libraspec_sglang.patches._base import Swap

_MODULE = "sglang.srt.layers.attention.flashinfer_backend"
_swap = Swap()


def _execute_with_flashinfer() -> types.ModuleType:
    # the first import settles every dependency while the answer is still no; the reload then runs
    # this module alone with the answer yes
    module = importlib.import_module(_MODULE)
    if hasattr(module, "BatchPrefillWithPagedKVCacheWrapper"):
        return module
    before = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == _MODULE}
    import sglang.srt.utils as utils

    answer = Swap()
    answer.attribute(utils, "is_flashinfer_available", lambda: True)
    try:
        importlib.reload(module)
    finally:
        answer.undo()
    module.is_flashinfer_available = utils.is_flashinfer_available
    # whoever imported the first classes by name must see the ones the backend now uses
    for other in list(sys.modules.values()):
        if not isinstance(other, types.ModuleType) or other is module:
            continue
        for name, old in before.items():
            if vars(other).get(name) is old:
                setattr(other, name, getattr(module, name))
    return module


def apply() -> None:
    if _swap.applied:
        return
    module = _execute_with_flashinfer()
    _swap.attribute(module, "torch", TorchOnCpu())


def undo() -> None:
    _swap.undo()
