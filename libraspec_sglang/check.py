"""``libraspec check``: is this installation able to do its job? One line per answer."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .cpu import enable


@dataclass(frozen=True)
class Result:
    """Outcome of one check."""

    name: str
    ok: bool
    detail: str


def run_checks(drafter: str | None = None, target: str | None = None) -> Iterator[Result]:
    """Run all checks in order; a check that raises is a fault, not an exception."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("versions", _versions),
        ("options", _options),
        ("device", _device),
        ("plugin", _plugin),
        ("contract", _contract),
        ("kernels", _kernels),
    ]
    if drafter is not None:
        checks.append(("drafter", lambda: _drafter(drafter, target)))
    for name, check in checks:
        try:
            yield Result(name, True, check())
        except Exception as error:
            yield Result(name, False, f"{error}" or type(error).__name__)


def _versions() -> str:
    packages = ("libraspec-sglang", "sglang", "torch", "flashinfer-python", "triton")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def _options() -> str:
    from . import options

    return ", ".join(f"{k}={v}" for k, v in options.load().model_dump().items() if v is not None)


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    if not enable.wanted():
        raise RuntimeError("no CUDA device and LIBRASPEC_CPU=0; unset it to run on the CPU")
    threads = os.environ.get("OMP_NUM_THREADS", "1 (set by libraspec)")
    return f"no CUDA device: CPU runtime, OMP_NUM_THREADS={threads}"


def _plugin() -> str:
    found = [
        e
        for e in importlib.metadata.entry_points(group="sglang.srt.plugins")
        if e.name == "libraspec"
    ]
    if not found:
        raise RuntimeError("entry point 'libraspec' is not installed; reinstall libraspec-sglang")
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and "libraspec" not in allowed.split(","):
        raise RuntimeError(f"SGLANG_PLUGINS={allowed} leaves libraspec out; add it")
    return f"{found[0].value}"


def _contract() -> str:
    from .engine import contract

    enable.enable_cpu()
    contract.require()
    return (
        f"SGLang {contract.SUPPORTED[-1]}: {len(contract.FUNCTIONS)} functions and "
        f"{len(contract.FIELDS)} types as expected"
    )


def _kernels() -> str:
    """The attention of record answers correctly on this device, ragged rows included."""
    from .cpu import install

    if install.active():
        install.install()
    from .verify.selftest import ragged_attention_error

    error = ragged_attention_error()
    if not error < 2e-2:
        raise RuntimeError(f"FlashInfer ragged attention is off by {error:.2e}")
    return f"FlashInfer ragged attention agrees with plain attention (largest error {error:.1e})"


def _drafter(drafter: str, target: str | None) -> str:
    import json

    from .drafters import checkpoint

    draft = checkpoint.read(drafter)
    if target is not None:
        config = json.loads((Path(target) / "config.json").read_text())
        checkpoint.check_against_target(draft, config.get("text_config", config))
    hot = (
        "whole vocabulary" if draft.hot_token_ids is None else f"{len(draft.hot_token_ids)} tokens"
    )
    return f"{draft.path}: block {draft.block_size}, drafts from {hot}"
