"""What a confidence is worth: p(accepted | confidence, position), learnt from every round.

A drafter's confidence is a marginal over blocks it has not seen verified; what lengths need is the
chance that a token is accepted *given that all before it were*. Each verification reveals that for
free, up to and including the first miss: positions after it, and positions not verified, are
censored and teach nothing.

Two levels of counts, both with forgetting: per confidence bin over all positions, and per position
and bin. Each leans on the coarser one (and the coarsest on the confidence itself) until it has
evidence, so a young table returns q.
"""

from __future__ import annotations

import math

import numpy as np

BINS = 12
WEIGHT = 16.0
"""Observations a coarser estimate counts for."""
HORIZON = 4000.0
"""Observations after which old evidence has faded to 1/e, so that no one text dominates long."""
REFRESH_EVERY = 4
"""Rounds whose evidence comes into force together; one round says little."""
REQUEST_SHARE = 0.25
"""Largest part of one round's evidence that a single request may supply in a batch."""


class Calibration:
    """Shared across requests; one per drafter."""

    def __init__(self, depth: int) -> None:
        """Args: depth: D, the deepest position."""
        self._seen = np.zeros((depth, BINS))
        self._accepted = np.zeros((depth, BINS))
        self._rows = np.arange(depth)
        self._base, self._slope = np.zeros((depth, BINS)), np.ones((depth, BINS))
        self._lists = self._base.tolist(), self._slope.tolist()
        self._stale = 0
        self.observed = 0

    def probability(self, confidence: np.ndarray) -> np.ndarray:
        """p of the same shape [bs, D'] as the confidences, D' <= depth; NaN counts as 0."""
        q = np.nan_to_num(confidence, nan=0.0).clip(0.0, 1.0)
        cell = self._rows[: q.shape[1]] * BINS + _bin(q)
        return self._base.take(cell) + self._slope.take(cell) * q

    def chances(self, confidence: list[float]) -> list[float]:
        """:meth:`probability` of one request, in plain Python: faster than arrays that short."""
        base, slope = self._lists
        out = []
        for position, value in enumerate(confidence):
            q = min(max(value, 0.0), 1.0) if value == value else 0.0
            place = min(int(q * BINS), BINS - 1)
            out.append(base[position][place] + slope[position][place] * q)
        return out

    def update_one(self, confidence: list[float], verified: int, accepted: int) -> None:
        """:meth:`update` with one request."""
        total = min(verified, accepted + 1, len(confidence))
        if not total:
            return
        fade = math.exp(-total / HORIZON)
        self._seen *= fade
        self._accepted *= fade
        for position in range(total):
            value = confidence[position]
            q = min(max(value, 0.0), 1.0) if value == value else 0.0
            place = min(int(q * BINS), BINS - 1)
            self._seen[position, place] += 1.0
            if position < accepted:
                self._accepted[position, place] += 1.0
        self._count(total)

    def _count(self, total: int) -> None:
        self.observed += total
        self._stale += 1
        if self._stale >= REFRESH_EVERY:
            self._refresh()

    def _refresh(self) -> None:
        """Both levels folded into p = base + slope * q per position and bin.

        Coarse: (A_b + w q) / (N_b + w) over all positions; fine: (a + w coarse) / (n + w).
        """
        coarse = self._seen.sum(0) + WEIGHT
        fine = self._seen + WEIGHT
        self._base = (self._accepted + WEIGHT * self._accepted.sum(0) / coarse) / fine
        self._slope = WEIGHT * WEIGHT / (coarse * fine)
        self._lists = self._base.tolist(), self._slope.tolist()
        self._stale = 0

    def survival(self, confidence: np.ndarray) -> np.ndarray:
        """[bs, D'] probability that a token and all before it are accepted."""
        return np.cumprod(self.probability(confidence), axis=1)

    def update(self, confidence: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from one round.

        Args:
            confidence: [bs, D'] as drafted.
            verified: [bs] drafted tokens that were verified.
            accepted: [bs] of them accepted.
        """
        depth = confidence.shape[1]
        if not depth:
            return
        place = self._rows[:depth]
        known = place < np.minimum(verified, accepted + 1)[:, None]
        total = int(known.sum())
        if not total:
            return
        fade = np.exp(-total / HORIZON)
        self._seen *= fade
        self._accepted *= fade
        weight = np.ones(known.shape)
        if known.shape[0] > 1 / REQUEST_SHARE:
            share = known.sum(1) / total
            weight *= np.minimum(1.0, REQUEST_SHARE / np.maximum(share, 1e-9))[:, None]
        bins = _bin(np.nan_to_num(confidence, nan=0.0).clip(0.0, 1.0))
        request, position = np.nonzero(known)
        cell = position * BINS + bins[request, position]
        weight = weight[request, position]
        size, shape = self._seen.size, self._seen.shape
        self._seen += np.bincount(cell, weight, size).reshape(shape)
        hit = weight * (position < accepted[request])
        self._accepted += np.bincount(cell, hit, size).reshape(shape)
        self._count(total)


def _bin(q: np.ndarray) -> np.ndarray:
    return np.minimum((q * BINS).astype(np.int64), BINS - 1)
