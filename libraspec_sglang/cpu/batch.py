"""What one FlashInfer ``plan()`` fixes for a batch, kept for all layers of a forward.

FlashInfer's compiled ``plan`` schedules work on the GPU; ours resolves, once per forward, which
cache rows each request reads, which mask applies, and which requests are cheaper in one padded call
than request by request (short ones, when a few of the batch are long).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from libraspec_sglang.cpu import attention

NON_CAUSAL, CAUSAL, CUSTOM = 0, 1, 2
"""flashinfer.utils.MaskMode."""

# Measured on one AVX2 core: the cost of one more attention call, of gathering one cache element,
# and of one multiply-add of attention. Only their ratios matter, to choose padding.
_CALL_US, _GATHER_US, _MAC_US = 50.0, 2e-5, 8e-5
_MAX_CACHED_MASK = _MAX_PADDED_MASK = 1 << 24  # elements


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
    numbers = index.numpy()
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == n - 1 and bool((numbers[1:] - numbers[:-1] == 1).all()):
        return Rows(None, first, n)
    return Rows(index, first, n)


@dataclass
class BatchPlan:
    """Opaque to FlashInfer: it stores what ``plan`` returns and hands it to ``run``."""

    qo_indptr: list[int]
    kv_lens: list[int] | None  # None: derived at the first run from the page tables
    page_size: int
    _rows: dict[int, Rows] | None = None  # of requests that run alone
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

    def mask(self, request, lo: int, hi: int, mode: int, window: int, dtype, group: int):
        """Additive mask [1, 1, group (hi - lo), K] of one request's queries lo..hi.

        None if they see all keys.
        """
        qo_len, kv_len = self.qo_lens[request], self.kv_lens[request]
        key = (request, lo, hi, mode, window, dtype, group)
        if key in self._masks:
            return self._masks[key]
        no_window = window < 0 or window >= kv_len - 1
        if mode == NON_CAUSAL and no_window:
            return None
        if mode == CAUSAL and qo_len == 1 and no_window:
            return None
        if mode == CAUSAL and no_window and (lo, hi) == (0, qo_len) and qo_len <= kv_len:
            out = attention.causal(qo_len, kv_len, dtype, group)
        else:
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
            out = attention.additive(shown[None], dtype, group)
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
            together = self._together(k_cache[0].numel() * 2, q[0].numel())
            self._padded = _Padded(self, tokens, together) if together else None
            alone = set(range(len(tokens))).difference(together)
            self._rows = {request: _rows(tokens[request]) for request in sorted(alone)}
        if self._padded is not None:
            self._padded.run(q, k_cache, v_cache, mode, window, scale, cap, o, lse)
        for request, rows in self._rows.items():
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
        short = 1 < length <= attention.Q_BLOCK and 0 < kv_len <= attention.UNPACKED_KEYS
        if short and cap <= 0 and lse is None:
            mask = self.mask(request, 0, length, mode, window, q.dtype, 1)
            o[start:end] = attention.attend_one(q[start:end], k, v, mask, scale)
            return
        # a mask is at most Q_BLOCK rows tall; without one there is nothing to bound
        block = length if mode == NON_CAUSAL and window < 0 else attention.Q_BLOCK
        for lo in range(0, length, block):
            hi = min(lo + block, length)
            # keys beyond the block's last visible one need not be scored
            seen = kv_len if mode != CAUSAL else max(0, min(kv_len, hi + kv_len - length))
            mask = self.mask(request, lo, hi, mode, window, q.dtype, q.shape[1] // k.shape[1])
            if mask is not None and seen < kv_len:
                mask = mask[..., :seen]
            keys, values = (k, v) if seen == kv_len else (k[:seen], v[:seen])
            queries = q[start + lo : start + hi]
            out, out_lse = attention.attend(
                queries[None], keys[None], values[None], mask, scale, cap, lse is not None
            )
            o[start + lo : start + hi] = out[0]
            if lse is not None:
                lse[start + lo : start + hi] = out_lse[0]

    def _together(self, kv_elements: int, q_elements: int) -> list[int]:
        """Requests that are cheaper in one padded call than in a call each; none or at least two.

        The shortest ones of the batch: as many as save most.
        """
        qo, kv = self.qo_lens, self.kv_lens
        best, saved = 0, 0.0
        order = sorted((r for r, keys in enumerate(kv) if keys), key=lambda r: (qo[r], kv[r]))
        group = max(2 * q_elements // kv_elements, 1)  # query heads of a kv head
        k_max = mac = 0
        for n, request in enumerate(order, 1):
            k_max, q_max = max(k_max, kv[request]), qo[request]
            mac += q_max * kv[request]
            if n * q_max * k_max * group > _MAX_PADDED_MASK:
                break
            gathered = n * k_max * kv_elements  # alone, most requests read one run
            padding = (n * q_max * k_max - mac) * q_elements
            saving = (n - 1) * _CALL_US - gathered * _GATHER_US - padding * _MAC_US
            if q_max and saving > saved:
                best, saved = n, saving
        return sorted(order[:best])


class _Padded:
    """Requests of a batch padded to the longest of them, for one call per layer.

    Padding keys repeat a row of the same request (a foreign or uninitialised row could hold a
    NaN, and 0 * NaN is NaN), and the mask hides them.
    """

    def __init__(self, plan: BatchPlan, tokens: list[torch.Tensor], requests: list[int]):
        self.requests, self.bs, self._masks = requests, len(requests), plan._masks
        self.qo_lens = [plan.qo_lens[r] for r in requests]
        self.kv_lens = [plan.kv_lens[r] for r in requests]
        self.length, self.keys = max(self.qo_lens), max(self.kv_lens)
        index = torch.zeros(self.bs, self.keys, dtype=torch.int64)
        for row, request in enumerate(requests):
            t = tokens[request]
            index[row, : t.numel()] = t
            if 0 < t.numel() < self.keys:
                index[row, t.numel() :] = int(t[-1])
        self.rows = _rows(index.view(-1))
        self.even_q = min(self.qo_lens) == self.length
        self.even_kv = min(self.kv_lens) == self.keys
        self.whole = self.even_q and self.bs == len(tokens)
        if not self.whole:
            number = torch.arange(self.length)
            starts = torch.tensor([plan.qo_indptr[r] for r in requests])[:, None]
            lens = torch.tensor(self.qo_lens)[:, None]
            rows = (starts + number.minimum((lens - 1).clamp(min=0))).view(-1)
            self.spread = rows.clamp_(max=plan.qo_indptr[-1] - 1)
            self.kept = (number < lens).view(-1).nonzero().view(-1)
            self.home = self.spread.index_select(0, self.kept)

    def mask(self, mode: int, window: int, dtype, group: int) -> torch.Tensor | None:
        """Additive mask [bs, 1, group L or 1, K], or None if every query sees all keys."""
        key = ("padded", mode, window, dtype, group)
        cache = self._masks
        if key in cache:
            return cache[key]
        one_row = self.length == 1
        if self.even_kv and window < 0 and (mode == NON_CAUSAL or (mode == CAUSAL and one_row)):
            cache[key] = None
            return None
        shown = attention.visible(
            torch.tensor(self.qo_lens).view(-1, 1, 1),
            torch.tensor(self.kv_lens).view(-1, 1, 1),
            torch.arange(self.length).view(1, -1, 1),
            torch.arange(self.keys).view(1, 1, -1),
            mode == CAUSAL,
            window,
        )
        if mode == CUSTOM:
            shown = shown.expand(self.bs, self.length, self.keys).clone()
            for row, request in enumerate(self.requests):
                bits = cache["bits"][request]
                shown[row, : bits.shape[0], : bits.shape[1]] &= bits
        cache[key] = attention.additive(shown, dtype, group)
        return cache[key]

    def run(self, q, k_cache, v_cache, mode, window, scale, cap, o, lse):
        k = self.rows.take(k_cache).view(self.bs, self.keys, *k_cache.shape[1:])
        v = self.rows.take(v_cache).view(self.bs, self.keys, *v_cache.shape[1:])
        used = q[: self.bs * self.length] if self.whole else q.index_select(0, self.spread)
        used = used.view(self.bs, self.length, *q.shape[1:])
        mask = self.mask(mode, window, q.dtype, q.shape[1] // k.shape[2])
        out, out_lse = attention.attend(used, k, v, mask, scale, cap, lse is not None)
        self._put(o, out.flatten(0, 1))
        if lse is not None:
            self._put(lse, out_lse.flatten(0, 1))

    def _put(self, into: torch.Tensor, padded: torch.Tensor) -> None:
        """The requests' rows of ``padded`` [bs * length, ...], where they belong."""
        if self.whole:
            into[: padded.shape[0]] = padded
            return
        rows = padded if self.even_q else padded.index_select(0, self.kept)
        into.index_copy_(0, self.home, rows)
