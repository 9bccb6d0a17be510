"""The scheduler's internal state reports how often each CPU attention function ran.

Why: SGLang swallows a plugin's exceptions, so a comparison could pass because the code under test
was never loaded. ``Engine.get_server_info()["internal_states"][0]["libraspec_cpu_calls"]`` and
``GET /server_info`` show that it ran.
Where: ``Scheduler.get_internal_state`` (SGLang 0.5.23).
Undo: the hook passes through.
"""

from __future__ import annotations

from libraspec_sglang.cpu.flashinfer_leaves import CALLS
from libraspec_sglang.patches._base import Hook


def _around(original, self, *args, **kwargs):
    out = original(self, *args, **kwargs)
    out.internal_state["libraspec_cpu_calls"] = dict(CALLS)
    return out


_hook = Hook("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _around)
apply, undo = _hook.apply, _hook.undo
