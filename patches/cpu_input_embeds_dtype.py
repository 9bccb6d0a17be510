"""Input embeddings keep their dtype.

Why: the runner casts them to bfloat16 whatever the model's dtype, so a float32 DFlash draft, which
is fed embeddings, fails in its first matmul. Exact tests need float32.
Where: ``ModelRunner._extend_forward_kwargs`` in SGLang 0.5.23 (model_runner.py:1772); no upstream
issue known to us.
Undo: the hook passes through.
"""

from __future__ import annotations

import torch

from libraspec_sglang.patches._base import Hook


def _around(original, self, forward_batch, *args, **kwargs):
    out = original(self, forward_batch, *args, **kwargs)
    given = forward_batch.input_embeds
    if given is not None and given.dtype != torch.bfloat16:
        # with replacements the cast tensor was written to: keep it, in the model's dtype
        replaced = forward_batch.replace_embeds is not None
        out["input_embeds"] = out["input_embeds"].to(given.dtype) if replaced else given
    return out


_hook = Hook("sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs", _around)
apply, undo = _hook.apply, _hook.undo
