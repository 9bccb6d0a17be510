"""DFLASH accepts device "cpu".

Why: the check lists cuda, npu and xpu, or asks an out-of-tree platform. While the handler runs it
sees a platform object that answers as an out-of-tree one supporting DFLASH; being one for the whole
process would flip many unrelated branches.
Where: ``sglang.srt.arg_groups.speculative_hook._handle_dflash`` (SGLang 0.5.23).
Undo: the hook passes through.
"""

from __future__ import annotations

from typing import Any

from libraspec_sglang.patches._base import Hook, Swap


class _DflashPlatform:
    """The current platform, except that it vouches for DFLASH."""

    def __init__(self, platform: Any, draft_backends: tuple[str, ...]):
        self._platform, self._draft_backends = platform, draft_backends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, _algorithm: str, backend: str) -> bool:
        return backend in self._draft_backends

    def get_default_speculative_draft_attention_backend(self, _algorithm: str) -> str:
        return "flashinfer"


def _around(original, server_args):
    from sglang.srt.arg_groups import speculative_hook as hook

    if hook.resolving_view(server_args).device != "cpu":
        return original(server_args)
    platform = Swap()
    platform.attribute(
        hook, "current_platform", _DflashPlatform(hook.current_platform, ("flashinfer",))
    )
    try:
        return original(server_args)
    finally:
        platform.undo()


_hook = Hook("sglang.srt.arg_groups.speculative_hook._handle_dflash", _around)
apply, undo = _hook.apply, _hook.undo
