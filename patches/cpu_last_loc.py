"""The slot of each request's last token is looked up in torch (needed for page_size > 1).

Why: ``get_last_loc`` picks its Triton kernel by the attention backend's name alone.
Where: ``get_last_loc_triton`` in ``sglang.srt.mem_cache.allocation`` (SGLang 0.5.23), which holds
the torch version too.
Undo: the hook passes through.
"""

from __future__ import annotations

from libraspec_sglang.patches._base import Hook


def _around(original, req_to_token, req_pool_indices, prefix_lens):
    if req_to_token.device.type != "cpu":
        return original(req_to_token, req_pool_indices, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


_hook = Hook("sglang.srt.mem_cache.allocation.get_last_loc_triton", _around)
apply, undo = _hook.apply, _hook.undo
