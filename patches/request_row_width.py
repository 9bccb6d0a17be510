"""A request's row holds the whole reservation of a decode step, at every page size.

Why: DFLASH-style decoding reserves twice the window beyond the committed length, but at page size 1
SGLang sizes request rows for one window. Near the end of the context the reservation then passes
the end of the row: on a GPU into a neighbour's row, silently; on a CPU as an exception.
Where: ``get_req_to_token_extra_context_len`` in SGLang 0.5.23 (mem_cache/allocation_sizing.py),
which adds the missing part for larger pages only. Upstream: sgl-project/sglang#33579.
Undo: the hook passes through; pools already built keep their width.
"""

from __future__ import annotations

from libraspec_sglang.patches._base import Hook


def _around(original) -> int:
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_page_size,
        get_alloc_reserve_per_decode,
    )
    from sglang.srt.runtime_context import get_spec

    extra = original()
    if get_spec().speculative_algorithm is None:
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


_hook = Hook(
    "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len", _around
)
apply, undo = _hook.apply, _hook.undo
