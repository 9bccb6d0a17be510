"""On CPU the default attention backend is flashinfer instead of intel_amx / torch_native.

Why: neither default serves speculative verification, and the point of the CPU runtime is to
execute the backend a GPU would use. An explicit --attention-backend is respected.
Where: ``sglang.srt.arg_groups.platform_hook.handle_cpu_backends`` (SGLang 0.5.23).
Undo: the hook passes through.
"""

from __future__ import annotations

from libraspec_sglang.patches._base import Hook


def _around(original, server_args):
    from sglang.srt.arg_groups import platform_hook

    cfg = platform_hook.resolving_view(server_args)
    if cfg.device == "cpu" and cfg.attention_backend is None:
        platform_hook.declare_resolution(
            server_args, "libraspec_cpu_default_backend", attention_backend="flashinfer"
        )
    return original(server_args)


_hook = Hook("sglang.srt.arg_groups.platform_hook.handle_cpu_backends", _around)
apply, undo = _hook.apply, _hook.undo
