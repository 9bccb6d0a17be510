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

import numpy as np

BINS = 12
WEIGHT = 16.0
"""Observations a coarser estimate counts for."""
HORIZON = 4000.0
"""Observations after which old evidence has faded to 1/e, so that no one text dominates long."""
REQUEST_SHARE = 0.25
"""Largest part of one round's evidence that a single request may supply in a batch."""


class Calibration:
    """Shared across requests; one per drafter."""

    def __init__(self, depth: int) -> None:
        """Args: depth: D, the deepest position."""
        self._seen = np.zeros((depth, BINS))
        self._accepted = np.zeros((depth, BINS))
        self._rows = np.arange(depth)
        self.observed = 0

    def probability(self, confidence: np.ndarray) -> np.ndarray:
        """p of the same shape [bs, D'] as the confidences, D' <= depth; NaN counts as 0."""
        q = np.nan_to_num(confidence, nan=0.0).clip(0.0, 1.0)
        if not self.observed:
            return q
        bins = _bin(q)
        seen, accepted = self._seen.sum(0), self._accepted.sum(0)
        coarse = (accepted[bins] + WEIGHT * q) / (seen[bins] + WEIGHT)
        where = self._rows[: q.shape[1]]
        return (self._accepted[where, bins] + WEIGHT * coarse) / (self._seen[where, bins] + WEIGHT)

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
        self.observed += total


def _bin(q: np.ndarray) -> np.ndarray:
    return np.minimum((q * BINS).astype(np.int64), BINS - 1)
