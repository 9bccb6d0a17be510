"""The arithmetic of FlashInfer's attention kernels, in torch, for one padded batch or one request.

Semantics (from FlashInfer's headers; tests/unit/test_cpu_leaves.py checks them against loops):

- causal is aligned bottom-right: query i of L sees key j of K iff ``j <= i + K - L``;
- ``window_left`` is inclusive and applies on top of any mask, custom ones too:
  key j is in query i's window iff ``j + window_left >= i + K - L``;
- log-sum-exp is base 2; a row that sees no key gives output 0 and LSE -inf.

Speed: one fused kernel per call. A kv head's whole query group is packed into rows of one matrix,
as FlashInfer itself does, so K and V are read once per kv head and never repeated.
"""

from __future__ import annotations

import math

import torch

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LOG2_E = math.log2(math.e)

UNPACKED_KEYS = 1024
"""Keys up to which one request's heads are cheaper unpacked: more reads, fewer copies."""
Q_BLOCK = 256
"""Queries per block of a long masked prefill: bounds the mask to Q_BLOCK x K."""


def visible(
    qo_len: torch.Tensor,
    kv_len: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    causal: bool,
    window_left: int,
) -> torch.Tensor:
    """Which key each query sees. All arguments broadcast together; returns bool.

    qo_len, kv_len: the request's lengths; rows, columns: query and key numbers in the request.
    """
    shown = columns < kv_len
    last = rows + (kv_len - qo_len)
    if causal:
        shown = shown & (columns <= last)
    if window_left >= 0:
        shown = shown & (columns + window_left >= last)
    return shown


def additive(shown: torch.Tensor, dtype: torch.dtype, group: int) -> torch.Tensor:
    """The form the fused kernel adds to the scores, for the rows that :func:`attend` packs.

    shown: bool [bs or 1, L or 1, K]; group: query heads of a kv head. Returns 0 / -inf
    [bs or 1, 1, group L or 1, K].
    """
    mask = torch.zeros(shown.shape, dtype=dtype).masked_fill_(~shown, -math.inf)[:, None]
    return mask.repeat(1, 1, group, 1) if shown.shape[1] > 1 and group > 1 else mask


def causal(length: int, keys: int, dtype: torch.dtype, group: int) -> torch.Tensor:
    """:func:`additive` of the causal mask of one request, in fewer steps; length <= keys."""
    mask = torch.zeros(1, 1, group, length, keys, dtype=dtype)
    mask[..., keys - length :] = torch.full((length, length), -math.inf, dtype=dtype).triu_(1)
    return mask.view(1, 1, group * length, keys)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float = 0.0,
    want_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Grouped-query attention of a padded batch.

    q: [bs, L, Hq, D]; k, v: [bs, K, Hkv, D]; mask: None, or as :func:`additive` makes it.
    Returns o [bs, L, Hq, Dv] and lse [bs, L, Hq] float32, base 2 (None unless asked).
    """
    bs, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    if k.shape[1] == 0:
        lse = torch.full((bs, length, heads), -math.inf) if want_lse else None
        return q.new_zeros(bs, length, heads, v.shape[3]), lse
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if k.dtype != q.dtype:  # an fp8 cache: FlashInfer converts on load as well
        k, v = k.to(q.dtype), v.to(q.dtype)
    # rows of one kv head: group-major, so a [L, K] mask repeats by tiling
    packed = (
        q.view(bs, kv_heads, group, -1)
        if length == 1
        else q.view(bs, length, kv_heads, group, -1)
        .permute(0, 2, 3, 1, 4)
        .reshape(bs, kv_heads, group * length, -1)
    )
    if soft_cap > 0:
        o, lse = _attend_capped(packed, k, v, mask, scale, soft_cap)
    else:
        o, lse = _FLASH(packed, k, v, 0.0, False, attn_mask=mask, scale=scale)
        if want_lse and mask is not None:
            # the fused kernel reports 0 for a row without keys
            lse = lse.masked_fill((mask == -math.inf).all(-1), -math.inf)
    if length == 1:
        o = o.reshape(bs, 1, heads, -1)
    else:
        o = o.view(bs, kv_heads, group, length, -1).permute(0, 3, 1, 2, 4)
        o = o.reshape(bs, length, heads, -1)
    if not want_lse:
        return o, None
    lse = lse.reshape(bs, kv_heads, group, length).permute(0, 3, 1, 2)
    return o, lse.reshape(bs, length, heads).float() * LOG2_E


def _attend_capped(q, k, v, mask, scale, soft_cap):
    """Scores squashed to soft_cap * tanh(s / soft_cap) before masking (Gemma 2, Grok)."""
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.matmul(weights, v.float()).to(q.dtype), lse


def attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """:func:`attend` for one request, its heads unpacked: none of its queries is copied.

    q: [L, Hq, D]; k, v: [K, Hkv, D]; mask: None or [1, 1, L, K] additive. Returns [L, Hq, D].
    """
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in (q, k, v))
    return _FLASH(q, k, v, 0.0, False, attn_mask=mask, scale=scale)[0].transpose(1, 2)[0]


def attend_causal_square(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of one request whose keys are exactly its queries; no mask is built.

    q: [L, Hq, D]; k, v: [L, Hkv, D]. Returns [L, Hq, Dv].
    """
    q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
    return _FLASH(q, k, v, 0.0, True, scale=scale)[0].transpose(1, 2)[0]


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention results over disjoint keys by their base-2 LSE.

    v: [n, H, D]; s: [n, H] float32. Two empty results give 0 and -inf, as in FlashInfer.
    """
    top = torch.maximum(s_a, s_b)
    top = top.masked_fill(top == -math.inf, 0.0)
    w_a, w_b = torch.exp2(s_a - top), torch.exp2(s_b - top)
    total = w_a + w_b
    safe = total.masked_fill(total == 0, 1.0)
    merged = v_a.float() * (w_a / safe)[..., None] + v_b.float() * (w_b / safe)[..., None]
    return merged.to(v_a.dtype), torch.log2(total) + top
