"""Ragged rows: request r verifies, or drafts behind, its anchor and d_r tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from libraspec_sglang.upload import upload, upload_together


@dataclass(frozen=True)
class VerifyRows:
    """The rows of one target forward, packed without padding, request after request.

    Attributes:
        lens: verified tokens per request, ``1 + d_r`` (host).
        lengths: int32 [bs], the same on the device.
        request: int64 [T], the request each row belongs to.
        width: largest of ``lens``.
        window: W, columns of the window.
        index: int64 [T], each row's place in the flattened [bs, W] window; None when every
            request verifies the same number of tokens (the rows are then the first ``width``
            columns).
    """

    lens: list[int]
    lengths: torch.Tensor
    request: torch.Tensor
    width: int
    window: int
    index: torch.Tensor | None

    @property
    def total(self) -> int:
        return int(self.request.shape[0])

    @property
    def first(self) -> torch.Tensor:
        """int64 [bs], each request's first row, its anchor's."""
        return torch.cumsum(self.lengths, dim=0, dtype=torch.int64) - self.lengths

    @property
    def columns(self) -> torch.Tensor | slice | None:
        """The rows' part of the window as SGLang's KV plan takes it; None for all of it."""
        if self.index is None and self.width < self.window:
            return slice(0, self.width)
        return self.index

    def take(self, window: torch.Tensor) -> torch.Tensor:
        """Pack a [bs, W] tensor of the window into [T] rows."""
        if self.index is None:
            return window[:, : self.width].reshape(-1)
        return window.reshape(-1)[self.index]

    def places(self, size: int) -> torch.Tensor:
        """int64 [size]: each row's place in the flattened window; beyond them -1, SGLang's sink."""
        index = self.index
        if index is None:
            index = upload(packed_index(self.lens, self.window), self.request.device)
        return padded(index, size, -1)

    def spread(self, rows: torch.Tensor, width: int, fill: int) -> torch.Tensor:
        """Unpack [T] rows into [bs, width], ``fill`` where a request has no row."""
        bs = len(self.lens)
        if self.index is None:
            out = rows.new_full((bs, width), fill)
            out[:, : self.width] = rows.view(bs, self.width)
            return out
        out = rows.new_full((bs * width,), fill)
        index = self.index
        if width != self.window:
            index = upload(packed_index(self.lens, width), self.request.device)
        out[index] = rows
        return out.view(bs, width)


def verify_rows(lens: list[int], window_width: int, device: torch.device | str) -> VerifyRows:
    """Lay out one verification. Nobody may write to its tensors: equal rows share theirs.

    Args:
        lens: tokens each request verifies, anchor included, each in 1..window_width.
        window_width: W, columns of the window the rows are taken from.
        device: where the index tensors live.

    Raises:
        ValueError: a length outside 1..W; a round must never write past its reserved slots.
    """
    if not lens or min(lens) < 1 or max(lens) > window_width:
        raise ValueError(f"verify lengths must be in 1..{window_width}, got {lens}")
    width = max(lens)
    if min(lens) == width:
        return _uniform(len(lens), width, window_width, torch.device(device))
    lengths, request, index = upload_together(
        [np.asarray(lens), _owners(lens), packed_index(lens, window_width)], device
    )
    return VerifyRows(lens, lengths.to(torch.int32), request, width, window_width, index)


@lru_cache(maxsize=512)
def _uniform(bs: int, width: int, window_width: int, device: torch.device) -> VerifyRows:
    """Plain rounds and fixed lengths come back all the time: nothing is sent to the device anew."""
    lens = [width] * bs
    lengths = torch.full((bs,), width, dtype=torch.int32, device=device)
    return VerifyRows(lens, lengths, upload(_owners(lens), device), width, window_width, None)


def _owners(lens: Sequence[int]) -> np.ndarray:
    """int64 [T], the request each row belongs to."""
    return np.repeat(np.arange(len(lens)), lens)


def padded(rows: torch.Tensor, size: int, fill: int = 0) -> torch.Tensor:
    """[T] rows and ``fill`` up to [size]."""
    return torch.nn.functional.pad(rows, (0, size - rows.shape[0]), value=fill)


def ragged_layout(rows: VerifyRows, size: int | None = None) -> RaggedVerifyLayout:
    """SGLang's description of unequal rows, with host lengths (its FlashInfer path needs them).

    Args:
        size: rows of the forward, where padding follows the batch's own.
    """
    indptr = rows.lengths.new_zeros(len(rows.lens) + 1)
    torch.cumsum(rows.lengths, dim=0, out=indptr[1:])
    return RaggedVerifyLayout(
        verify_lens=rows.lengths,
        graph_num_tokens=rows.total if size is None else size,
        extend_start_loc=indptr[:-1],
        qo_indptr_device=indptr,
        verify_lens_cpu=rows.lens,
        total_verify_tokens=rows.total,
    )


def packed_index(lens: Sequence[int], width: int) -> np.ndarray:
    """Flat positions in a [bs, width] grid of the first ``lens[r]`` columns of each row."""
    counts = np.asarray(lens, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    shift = np.arange(len(lens), dtype=np.int64) * width - starts
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(shift, counts)
