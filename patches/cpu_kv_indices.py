"""The gather of a batch's KV slots runs in torch instead of a Triton kernel.

Why: ``create_flashinfer_kv_indices_triton`` is launched without asking whether there is a GPU.
Where: the name in ``sglang.srt.mem_cache.kv_index_translator`` (SGLang 0.5.23).
Undo: the kernel is put back.
"""

from __future__ import annotations

import torch

from libraspec_sglang.patches._base import Swap

_swap = Swap()


def create_kv_indices(
    ids: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    indptr: torch.Tensor,
    start: torch.Tensor | None,
    out: torch.Tensor,
    _stride: int,
    ENTRY_PAGE_SIZE: int = 1,
    TOKEN_BLOCK_PARALLEL: bool = False,
    token_mapping: torch.Tensor | None = None,
) -> None:
    """Same arguments and result as the kernel.

    ids: [rows, width] slot table (page ids if ENTRY_PAGE_SIZE > 1); request b's slots from
    ``start[b]`` on, ``seq_lens[b]`` of them, go to ``out[indptr[b]:]``.
    """
    rows, lens, offsets = row_ids.tolist(), seq_lens.tolist(), indptr.tolist()
    starts = [0] * len(lens) if start is None else start.tolist()
    page = ENTRY_PAGE_SIZE
    for row, length, offset, first in zip(rows, lens, offsets, starts, strict=False):
        if length <= 0:
            continue
        if page == 1:
            slots = ids[row, first : first + length]
        else:
            position = torch.arange(first, first + length)
            entry = ids[row, position // page].long()
            slots = entry * page + position % page
        if token_mapping is not None:
            slots = torch.where(slots >= 0, token_mapping[slots.clamp(min=0).long()], slots)
        out[offset : offset + length] = slots


class _Launcher:
    """``kernel[grid](...)`` without a grid."""

    def __getitem__(self, _grid):
        return create_kv_indices


def apply() -> None:
    if _swap.applied:
        return
    from sglang.srt.mem_cache import kv_index_translator

    _swap.attribute(kv_index_translator, "create_flashinfer_kv_indices_triton", _Launcher())


def undo() -> None:
    _swap.undo()
