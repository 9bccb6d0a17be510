"""Decode attention over a bf16 KV cache with ragged lengths, compiled by numba.

One new token per slot, grouped-query attention. Slots of different lengths cost what they
hold (a padded torch version reads up to twice as much), and bf16 halves the memory traffic,
which is what bounds this step on a CPU.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LOG2E = np.float32(1.4426950408889634)
C0, C1, C2 = np.float32(1.0), np.float32(0.69315308), np.float32(0.24015361)
C3, C4, C5 = np.float32(0.05582631), np.float32(0.00898934), np.float32(0.00187758)


@njit(fastmath=True, boundscheck=False, cache=False, error_model="numpy")
def attend(q, keys, values, lengths, scale, out):
    """`out[b, h, g] = softmax(q[b, h, g] . keys[b, h, :n] * scale) @ values[b, h, :n]`.

    q, out `[B, KV, G, D]` float32; keys, values `[B, KV, T, D]` uint16 (bf16 bits);
    lengths `[B]`, the tokens each slot attends to (0 leaves its output untouched).
    """
    slots, kv_heads, group, dim = q.shape
    bits = np.empty(dim, dtype=np.uint32)
    row = bits.view(np.float32)
    power_bits = np.empty(keys.shape[2], dtype=np.uint32)
    power = power_bits.view(np.float32)
    scores = np.empty((group, keys.shape[2]), dtype=np.float32)
    for b in range(slots):
        n = lengths[b]
        if n == 0:
            continue
        for h in range(kv_heads):
            for t in range(n):
                for d in range(dim):
                    bits[d] = np.uint32(keys[b, h, t, d]) << np.uint32(16)
                for g in range(group):
                    total = np.float32(0.0)
                    for d in range(dim):
                        total += q[b, h, g, d] * row[d]
                    scores[g, t] = total * scale
            for g in range(group):
                top = scores[g, 0]
                for t in range(1, n):
                    top = max(top, scores[g, t])
                # exp(x) = 2^i * 2^f; the polynomial is 2^f to 2e-6 (numba's exp is scalar)
                for t in range(n):
                    y = max((scores[g, t] - top) * LOG2E, np.float32(-126.0))
                    i = np.floor(y)
                    f = y - i
                    power_bits[t] = np.uint32(np.int32(i) + np.int32(127)) << np.uint32(23)
                    scores[g, t] = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
                norm = np.float32(0.0)
                for t in range(n):
                    scores[g, t] *= power[t]
                    norm += scores[g, t]
                inverse = np.float32(1.0) / norm
                for t in range(n):
                    scores[g, t] *= inverse
                for d in range(dim):
                    out[b, h, g, d] = 0.0
            for t in range(n):
                for d in range(dim):
                    bits[d] = np.uint32(values[b, h, t, d]) << np.uint32(16)
                for g in range(group):
                    weight = scores[g, t]
                    for d in range(dim):
                        out[b, h, g, d] += weight * row[d]
