"""LibraSpec for stock SGLang: verify exactly as many drafted tokens as are worth verifying.

Importing this package imports neither sglang nor torch.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "configure", "enable_cpu"]


def configure(**options: Any) -> Any:
    """Set LibraSpec options for engines created afterwards; see :mod:`libraspec_sglang.options`."""
    from .options import configure as _configure

    return _configure(**options)


def enable_cpu() -> None:
    """Make SGLang run on this machine's CPU. Call before importing sglang; no-op with CUDA."""
    from .cpu.enable import enable_cpu as _enable_cpu

    _enable_cpu()
