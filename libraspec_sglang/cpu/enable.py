"""Whether this process runs without a GPU, and the environment that makes SGLang do so.

``LIBRASPEC_CPU=1`` forces the CPU runtime on, ``0`` off; unset, it is on exactly where torch sees
no CUDA device. On a machine with a GPU nothing here changes anything unless asked.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

from libraspec_sglang.options import OptionError

logger = logging.getLogger(__name__)

SHIM = Path(__file__).parent / "shim"
"""Directory of the stand-in ``sgl_kernel``; must precede site-packages on PYTHONPATH."""


def wanted() -> bool:
    """Whether the CPU runtime should be active in this process."""
    choice = os.environ.get("LIBRASPEC_CPU", "").strip()
    if choice in ("0", "1"):
        return choice == "1"
    if choice:
        raise OptionError(f"LIBRASPEC_CPU must be 0, 1 or unset, got {choice!r}")
    import torch

    return not torch.cuda.is_available()


def _cache_dir() -> Path:
    """A writable directory: the user's cache, or a temporary one where that is read-only."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libraspec-sglang"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"libraspec-sglang-{os.getuid()}"


def environment() -> dict[str, str]:
    """Variables a process that will import SGLang needs; ``{}`` where the runtime is not wanted.

    Whatever the user has set already is kept, except PYTHONPATH, which gets the stand-in in front.
    """
    if not wanted():
        return {}
    ours = str(SHIM)
    rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != ours]
    defaults = {
        # SGLang's own switch for its CPU paths (is_cpu())
        "SGLANG_USE_CPU_ENGINE": "1",
        # FlashInfer reads an architecture at import; no kernel is compiled for it
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        # ... and a directory to write generated sources to
        "FLASHINFER_WORKSPACE_BASE": str(_cache_dir()),
        # small models: more threads cost more in synchronisation than they give
        "OMP_NUM_THREADS": "1",
    }
    return {
        "LIBRASPEC_CPU": "1",
        "PYTHONPATH": os.pathsep.join([ours, *rest]),
        **{name: os.environ.get(name) or value for name, value in defaults.items()},
    }


def enable_cpu() -> bool:
    """Prepare this process, and those it spawns, for SGLang on CPU. Call before importing sglang.

    Returns whether the CPU runtime is on. Idempotent. Raises RuntimeError if the real
    ``sgl_kernel`` is already loaded, since SGLang has then bound its functions.
    """
    if not wanted():
        logger.info("CPU runtime not enabled: a CUDA device is present or LIBRASPEC_CPU=0")
        return False
    loaded = sys.modules.get("sgl_kernel")
    if loaded is not None and not hasattr(loaded, "LIBRASPEC_STAND_IN"):
        raise RuntimeError(
            "sgl_kernel is already imported from "
            f"{getattr(loaded, '__file__', '?')}: call enable_cpu() before importing sglang"
        )
    # environment() reads LIBRASPEC_CPU and PYTHONPATH, so a second call changes nothing
    os.environ.update(environment())
    Path(os.environ["FLASHINFER_WORKSPACE_BASE"]).mkdir(parents=True, exist_ok=True)
    if sys.path[:1] != [str(SHIM)]:
        sys.path[:] = [str(SHIM), *(p for p in sys.path if p != str(SHIM))]
    return True


def active() -> bool:
    """Whether this process was started for the CPU runtime, so that patches belong in it.

    Stricter than ``wanted()``: without the variables SGLang would take its CUDA paths anyway.
    """
    return wanted() and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
