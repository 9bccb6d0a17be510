"""``Tensor.record_stream`` does nothing for CPU tensors.

Why: SGLang's speculative workers call it on every tensor that crosses streams, and torch raises
for a tensor without a CUDA allocator block. There is one stream on CPU, so nothing to record.
Where: torch.Tensor; met in ``speculative/dflash_worker_v2.py`` of SGLang 0.5.23.
Undo: the method inherited from torch is uncovered again.
"""

from __future__ import annotations

import torch

from libraspec_sglang.patches._base import Swap

_swap = Swap()


def apply() -> None:
    if _swap.applied:
        return
    original = torch.Tensor.record_stream

    def record_stream(self: torch.Tensor, stream) -> None:
        if self.device.type != "cpu":
            original(self, stream)

    _swap.attribute(torch.Tensor, "record_stream", record_stream)


def undo() -> None:
    _swap.undo()
