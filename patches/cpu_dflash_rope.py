"""DFlash draft layers apply q/k norm and rotary embedding with torch ops.

Why: the fused path is a Triton kernel, chosen without asking for a GPU.
Where: ``DFlashAttention.use_table_qk_norm_rope`` in ``sglang.srt.models.dflash`` (SGLang 0.5.23),
an attribute set by ``__init__``; the torch path is the model's own.
Undo: the hook passes through; drafts built meanwhile keep the torch path.
"""

from __future__ import annotations

from libraspec_sglang.patches._base import Hook


def _around(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.use_table_qk_norm_rope = False


_hook = Hook("sglang.srt.models.dflash.DFlashAttention.__init__", _around)
apply, undo = _hook.apply, _hook.undo
