"""What one FlashInfer ``plan()`` fixes for a batch, kept for all layers of a forward.

FlashInfer's compiled ``plan`` schedules work on the GPU; ours resolves, once per forward, which
cache rows each request reads, which mask applies, and whether the batch is cheaper as one padded
call or request by request. Every layer then costs two gathers and one attention kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from libraspec_sglang.cpu import attention

NON_CAUSAL, CAUSAL, CUSTOM = 0, 1, 2
"""flashinfer.utils.MaskMode."""

# Measured on one AVX-512 core: the cost of one more attention call, of gathering one cache
# element, and of one multiply-add of attention. Only their ratios matter, to choose padding.
_CALL_US, _GATHER_US, _MAC_US = 35.0, 6e-4, 6e-5
_MAX_CACHED_MASK = 1 << 22
_MAX_PADDED_MASK = 1 << 24


@dataclass(frozen=True)
class Rows:
    """Cache rows a request, or a padded batch, reads."""

    index: torch.Tensor | None  # [n] rows to gather, or None when they are one run
    start: int
    length: int

    def take(self, cache: torch.Tensor) -> torch.Tensor:
        """cache: [rows, H, D] -> [n, H, D]; a run of rows is a view, not a copy."""
        if self.index is None:
            return cache[self.start : self.start + self.length]
        return cache.index_select(0, self.index)


def _rows(index: torch.Tensor) -> Rows:
    """Recognise a run of consecutive rows: a request's prefix in a fresh cache usually is one."""
    n = index.numel()
    if n == 0:
        return Rows(None, 0, 0)
    first, last = int(index[0]), int(index[-1])
    if last - first == n - 1 and bool((index[1:] - index[:-1] == 1).all()):
        return Rows(None, first, n)
    return Rows(index, first, n)


@dataclass
class BatchPlan:
    """Opaque to FlashInfer: it stores what ``plan`` returns and hands it to ``run``."""

    qo_indptr: list[int]
    kv_lens: list[int] | None  # None: derived at the first run from the page tables
    page_size: int
    _rows: list[Rows] | None = None
    _padded: _Padded | None = None
    _masks: dict = field(default_factory=dict)

    @property
    def qo_lens(self) -> list[int]:
        p = self.qo_indptr
        return [p[i + 1] - p[i] for i in range(len(p) - 1)]

    # -- keys and values -------------------------------------------------------------------

    def token_rows(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> list[torch.Tensor]:
        """Cache row of every token of every request, from FlashInfer's page tables."""
        ptr, page = indptr.tolist(), self.page_size
        pages = [b - a for a, b in pairwise(ptr)]
        if self.kv_lens is None:
            tail = last_page_len.tolist()
            self.kv_lens = [(n - 1) * page + t for n, t in zip(pages, tail, strict=False)]
        # FlashInfer's host side gives a request without pages its last page's length, one token;
        # its kernels see the missing pages first, and no token. SGLang plans such requests when it
        # prefills prompts with and without a cached prefix together.
        self.kv_lens = [k if n else 0 for k, n in zip(self.kv_lens, pages, strict=False)]
        out = []
        for start, n, length in zip(ptr, pages, self.kv_lens, strict=False):
            rows = indices[start : start + n]
            if page > 1:
                rows = (rows.long()[:, None] * page + torch.arange(page)).view(-1)
            out.append(rows[:length])
        return out

    # -- masks -----------------------------------------------------------------------------

    def mask(self, request: int, lo: int, hi: int, mode: int, window: int, dtype: torch.dtype):
        """Additive mask [1, hi - lo, K] of one request's queries lo..hi, or None if all is seen."""
        qo_len, kv_len = self.qo_lens[request], self.kv_lens[request]
        key = (request, lo, hi, mode, window, dtype)
        if key in self._masks:
            return self._masks[key]
        no_window = window < 0 or window >= kv_len - 1
        if mode == NON_CAUSAL and no_window:
            return None
        if mode == CAUSAL and qo_len == 1 and no_window:
            return None
        shown = attention.visible(
            torch.tensor(qo_len),
            torch.tensor(kv_len),
            torch.arange(lo, hi)[:, None],
            torch.arange(kv_len),
            mode == CAUSAL,
            window,
        )
        if mode == CUSTOM:
            shown = shown & self._masks["bits"][request][lo:hi]
        out = attention.additive(shown, dtype)[None]
        if out.numel() <= _MAX_CACHED_MASK:
            self._masks[key] = out
        return out

    def unpack(self, packed: torch.Tensor, indptr: torch.Tensor) -> None:
        """Custom masks from FlashInfer's packing: little bit order, byte offsets per request."""
        if "bits" in self._masks:
            return
        shifts = torch.arange(8, dtype=torch.uint8)
        bits, ptr = [], indptr.tolist()
        for request, (qo_len, kv_len) in enumerate(zip(self.qo_lens, self.kv_lens, strict=True)):
            raw = packed[ptr[request] : ptr[request + 1]]
            flat = ((raw[:, None] >> shifts) & 1).view(-1)[: qo_len * kv_len]
            if flat.numel() != qo_len * kv_len:
                raise ValueError(
                    f"custom mask of request {request} has {flat.numel()} bits, "
                    f"{qo_len} x {kv_len} are needed (is mask_indptr in bytes?)"
                )
            bits.append(flat.view(qo_len, kv_len).bool())
        self._masks["bits"] = bits

    # -- running ---------------------------------------------------------------------------

    def run_paged(
        self, q, k_cache, v_cache, indptr, indices, last_page_len, mode, window, scale, cap, o, lse
    ):
        """One layer over paged KV. q: [nnz, Hq, D]; caches: [pages, page_size, Hkv, D]."""
        k_cache, v_cache = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        if self._rows is None:
            tokens = self.token_rows(indptr, indices, last_page_len)
            kv, mac = k_cache[0].numel() * 2, q[0].numel()
            if self._pads_well(kv, mac):
                self._padded = _Padded(self, tokens)
            self._rows = [] if self._padded else [_rows(t) for t in tokens]
        if self._padded is not None:
            self._padded.run(q, k_cache, v_cache, mode, window, scale, cap, o, lse)
            return
        for request, rows in enumerate(self._rows):
            k, v = rows.take(k_cache), rows.take(v_cache)
            self._run_one(request, q, k, v, mode, window, scale, cap, o, lse)

    def run_ragged(self, q, k, v, kv_indptr, mode, window, scale, cap, o, lse):
        """One layer over packed keys. q: [nnz, Hq, D]; k, v: [nnz_kv, Hkv, D]."""
        ptr = kv_indptr.tolist()
        if self.kv_lens is None:
            self.kv_lens = [b - a for a, b in pairwise(ptr)]
        for request, n in enumerate(self.kv_lens):
            span = slice(ptr[request], ptr[request] + n)
            self._run_one(request, q, k[span], v[span], mode, window, scale, cap, o, lse)

    def _run_one(self, request, q, k, v, mode, window, scale, cap, o, lse):
        start, end = self.qo_indptr[request], self.qo_indptr[request + 1]
        length, kv_len = end - start, k.shape[0]
        if length == 0:
            return
        whole = length == kv_len and mode == CAUSAL and window < 0 and cap <= 0 and lse is None
        if whole and length > 1:
            o[start:end] = attention.attend_causal_square(q[start:end], k, v, scale)
            return
        # a mask is at most Q_BLOCK rows tall; without one there is nothing to bound
        block = length if mode == NON_CAUSAL and window < 0 else attention.Q_BLOCK
        for lo in range(0, length, block):
            hi = min(lo + block, length)
            # keys beyond the block's last visible one need not be scored
            seen = kv_len if mode != CAUSAL else max(0, min(kv_len, hi + kv_len - length))
            mask = self.mask(request, lo, hi, mode, window, q.dtype)
            if mask is not None and seen < kv_len:
                mask = mask[..., :seen]
            out, out_lse = attention.attend(
                q[start + lo : start + hi][None],
                k[:seen][None],
                v[:seen][None],
                mask,
                scale,
                cap,
                lse is not None,
            )
            o[start + lo : start + hi] = out[0]
            if lse is not None:
                lse[start + lo : start + hi] = out_lse[0]

    def _pads_well(self, kv_elements: int, q_elements: int) -> bool:
        """Whether one padded call beats one call per request (which pay per-call overhead)."""
        qo, kv = self.qo_lens, self.kv_lens
        bs = len(kv)
        if bs < 2 or max(kv) == 0 or max(qo) == 0:
            return False
        q_max, k_max = max(qo), max(kv)
        if bs * q_max * k_max > _MAX_PADDED_MASK:
            return False
        gather = (bs * k_max - sum(kv)) * kv_elements * _GATHER_US
        mac = bs * q_max * k_max - sum(a * b for a, b in zip(qo, kv, strict=True))
        return gather + mac * q_elements * _MAC_US < (bs - 1) * _CALL_US


class _Padded:
    """A batch padded to its longest request, for one call per layer.

    Padding keys repeat a row of the same request (a foreign or uninitialised row could hold a
    NaN, and 0 * NaN is NaN), and the mask hides them.
    """

    def __init__(self, plan: BatchPlan, tokens: list[torch.Tensor]):
        self.plan = plan
        self.bs, self.length, self.keys = len(tokens), max(plan.qo_lens), max(plan.kv_lens)
        index = torch.zeros(self.bs, self.keys, dtype=torch.int64)
        for row, t in enumerate(tokens):
            index[row, : t.numel()] = t
            if 0 < t.numel() < self.keys:
                index[row, t.numel() :] = int(t[-1])
        self.rows = _rows(index.view(-1))
        self.even_q = min(plan.qo_lens) == self.length
        self.even_kv = min(plan.kv_lens) == self.keys
        if not self.even_q:
            number = torch.arange(self.length)
            starts, lens = torch.tensor(plan.qo_indptr[:-1]), torch.tensor(plan.qo_lens)
            kept = number < lens[:, None]
            self.spread = (starts[:, None] + number.minimum((lens - 1).clamp(min=0)[:, None])).view(
                -1
            )
            self.spread.clamp_(max=plan.qo_indptr[-1] - 1)
            self.gather = kept.view(-1).nonzero().view(-1)

    def mask(self, mode: int, window: int, dtype: torch.dtype) -> torch.Tensor | None:
        key = ("padded", mode, window, dtype)
        cache = self.plan._masks
        if key in cache:
            return cache[key]
        plan = self.plan
        one_row = self.length == 1
        if self.even_kv and window < 0 and (mode == NON_CAUSAL or (mode == CAUSAL and one_row)):
            cache[key] = None
            return None
        shown = attention.visible(
            torch.tensor(plan.qo_lens).view(-1, 1, 1),
            torch.tensor(plan.kv_lens).view(-1, 1, 1),
            torch.arange(self.length).view(1, -1, 1),
            torch.arange(self.keys).view(1, 1, -1),
            mode == CAUSAL,
            window,
        )
        if mode == CUSTOM:
            shown = shown.expand(self.bs, self.length, self.keys).clone()
            for row, bits in enumerate(cache["bits"]):
                shown[row, : bits.shape[0], : bits.shape[1]] &= bits
        cache[key] = attention.additive(shown, dtype)
        return cache[key]

    def run(self, q, k_cache, v_cache, mode, window, scale, cap, o, lse):
        k = self.rows.take(k_cache).view(self.bs, self.keys, *k_cache.shape[1:])
        v = self.rows.take(v_cache).view(self.bs, self.keys, *v_cache.shape[1:])
        used = q[: self.plan.qo_indptr[-1]] if self.even_q else q.index_select(0, self.spread)
        used = used.view(self.bs, self.length, *q.shape[1:])
        out, out_lse = attention.attend(
            used, k, v, self.mask(mode, window, q.dtype), scale, cap, lse is not None
        )
        out = out.flatten(0, 1)
        out_lse = None if out_lse is None else out_lse.flatten(0, 1)
        if not self.even_q:
            out = out.index_select(0, self.gather)
            out_lse = None if out_lse is None else out_lse.index_select(0, self.gather)
        o[: out.shape[0]] = out
        if lse is not None:
            lse[: out.shape[0]] = out_lse
