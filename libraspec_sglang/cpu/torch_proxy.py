"""The ``torch`` that FlashInfer's host code and SGLang's FlashInfer backend see on CPU.

Both ask for ``device="cuda"`` and pinned memory by name. Giving those two modules a proxy in place
of their global ``torch`` leaves torch itself, and every other module, untouched.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

_FACTORIES = (
    "arange", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip


def _on_cpu(factory):
    @functools.wraps(factory)
    def make(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _Cuda:
    """``torch.cuda`` whose device context does nothing; anything else is torch's own."""

    @staticmethod
    def device(_device: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class TorchOnCpu:
    """Delegates to torch; see the module docstring for the three differences."""

    def __init__(self) -> None:
        self.cuda = _Cuda()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)
        return value
