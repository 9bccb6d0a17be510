"""CPU twins of the compiled functions FlashInfer's Python wrappers call.

FlashInfer's wrappers (planning, validation, mask packing) run unmodified; only what
``JitSpec.build_and_load`` would have compiled is replaced. The functions below therefore have the
signatures of FlashInfer 0.7.2's fa2 modules, positional as its Python passes them.

``CALLS`` counts calls by name. Tests read it (through the scheduler's internal state) to prove
that this code ran: a plugin that failed to load would otherwise pass every comparison.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from libraspec_sglang.cpu import attention
from libraspec_sglang.cpu.batch import CUSTOM, BatchPlan

CALLS: Counter[str] = Counter()

_NHD = 0
_MULTI_ITEM = 3


def _check(layout: int, mask_mode: int = 0) -> None:
    if layout != _NHD:
        raise NotImplementedError("the CPU reference serves FlashInfer's NHD layout only")
    if mask_mode == _MULTI_ITEM:
        raise NotImplementedError("multi-item scoring has no CPU reference")


def plan_prefill(
    _float_ws, _int_ws, _pinned_ws, qo_indptr, _kv_indptr, kv_lens, _max_rows, _bs, _qo_heads,
    _kv_heads, page_size, *_rest,
) -> BatchPlan:  # fmt: skip
    """fa2 ``plan``: host qo_indptr [bs + 1], kv lengths [bs] in tokens."""
    CALLS["plan"] += 1
    return BatchPlan(qo_indptr.tolist(), kv_lens.tolist(), page_size)


def plan_decode(
    _float_ws, _int_ws, _pinned_ws, _indptr, bs, _qo_heads, _kv_heads, page_size, *_rest
) -> BatchPlan:
    """Decode ``plan``: one query per request; lengths follow from the page tables at run."""
    CALLS["plan"] += 1
    return BatchPlan(list(range(bs + 1)), None, page_size)


def paged_run(
    _float_ws, _int_ws, plan, q, k_cache, v_cache, _qo_indptr, indptr, indices, last_page_len,
    o, lse, mask_mode, layout, window_left, _pdl, mask, mask_indptr, _alibi, _prefix_len,
    _token_pos, _max_item, _k_sf, _v_sf, soft_cap, scale, *_rest,
) -> None:  # fmt: skip
    """fa2 ``paged_run``: q [nnz, Hq, D] over caches [pages, page_size, Hkv, D] into o, lse."""
    CALLS["paged_run"] += 1
    _check(layout, mask_mode)
    if mask_mode == CUSTOM:
        CALLS["custom_mask"] += 1
        plan.unpack(mask, mask_indptr)
    plan.run_paged(
        q, k_cache, v_cache, indptr, indices, last_page_len, mask_mode, window_left, scale,
        soft_cap, o, lse,
    )  # fmt: skip


def ragged_run(
    _float_ws, _int_ws, plan, q, k, v, _qo_indptr, kv_indptr, o, lse, mask_mode, layout,
    window_left, _pdl, mask, mask_indptr, _alibi, _prefix_len, _token_pos, _max_item, _k_sf, _v_sf,
    soft_cap, scale, *_rest,
) -> None:  # fmt: skip
    """fa2 ``ragged_run``: q [nnz, Hq, D] over packed k, v [nnz_kv, Hkv, D] into o, lse."""
    CALLS["ragged_run"] += 1
    _check(layout, mask_mode)
    if mask_mode == CUSTOM:
        CALLS["custom_mask"] += 1
        plan.unpack(mask, mask_indptr)
    plan.run_ragged(q, k, v, kv_indptr, mask_mode, window_left, scale, soft_cap, o, lse)


def decode_run(
    _float_ws, _int_ws, plan, q, k_cache, v_cache, indptr, indices, last_page_len, o, lse, layout,
    window_left, _pdl, _alibi, soft_cap, scale, *_rest,
) -> None:  # fmt: skip
    """Decode ``run``: q [bs, Hq, D] over caches [pages, page_size, Hkv, D] into o, lse."""
    CALLS["decode_run"] += 1
    _check(layout)
    plan.run_paged(
        q, k_cache, v_cache, indptr, indices, last_page_len, 0, window_left, scale, soft_cap,
        o, lse,
    )  # fmt: skip


def merge_state(v_a, s_a, v_b, s_b, v_merged, s_merged) -> None:
    """cascade ``merge_state`` into preallocated v_merged [n, H, D] and s_merged [n, H]."""
    CALLS["merge_state"] += 1
    v, s = attention.merge_state(v_a, s_a, v_b, s_b)
    v_merged.copy_(v)
    s_merged.copy_(s)


def _pack(x: torch.Tensor, bitorder: str) -> torch.Tensor:
    # reinterpret-as-bool, as the CUDA kernel does, would hide a wrong dtype: convert instead
    return torch.from_numpy(np.packbits(x.bool().numpy(), bitorder=bitorder))


def packbits(x: torch.Tensor, bitorder: str, y: torch.Tensor) -> None:
    """quantization ``packbits``: bool [n] into y uint8 [ceil(n / 8)]."""
    CALLS["packbits"] += 1
    y.copy_(_pack(x, bitorder))


def segment_packbits(x, indptr, new_indptr, bitorder: str, y: torch.Tensor) -> None:
    """quantization ``segment_packbits``: each segment padded to whole bytes on its own."""
    CALLS["packbits"] += 1
    old, new = indptr.tolist(), new_indptr.tolist()
    if x.numel() < old[-1]:
        raise ValueError(f"mask has {x.numel()} entries, {old[-1]} are needed")
    for row in range(len(old) - 1):
        y[new[row] : new[row + 1]] = _pack(x[old[row] : old[row + 1]], bitorder)


_MODULES: dict[str, SimpleNamespace] = {
    "batch_prefill_with_kv_cache": SimpleNamespace(
        plan=plan_prefill, paged_run=paged_run, ragged_run=ragged_run
    ),
    "batch_decode_with_kv_cache": SimpleNamespace(plan=plan_decode, run=decode_run),
    "cascade": SimpleNamespace(merge_state=merge_state),
    "quantization": SimpleNamespace(packbits=packbits, segment_packbits=segment_packbits),
}


def module_for(spec: Any) -> SimpleNamespace:
    """The twin of the module ``spec`` (a FlashInfer JitSpec) would compile.

    Raises NotImplementedError for a module without one, at load rather than at a wrong result.
    """
    for prefix, module in _MODULES.items():
        if spec.name.startswith(prefix) and not spec.name.endswith("_sm90"):
            if "posenc_" in spec.name and "posenc_0" not in spec.name:
                break  # rotary or ALiBi inside the kernel
            return module
    raise NotImplementedError(
        f"FlashInfer's compiled module {spec.name!r} has no CPU reference in libraspec-sglang"
    )
