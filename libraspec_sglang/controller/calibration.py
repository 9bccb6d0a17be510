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

from .compiled import compiled

BINS = 12
WEIGHT = 16.0
"""Observations a coarser estimate counts for."""
HORIZON = 4000.0
"""Observations after which old evidence has faded to 1/e, so that no one text dominates long."""
REFRESH_EVERY = 4
"""Rounds whose evidence comes into force together; one round says little."""
ERROR_BINS = 10
REQUEST_SHARE = 0.25
"""Largest part of one round's evidence that a single request may supply in a batch."""


class Calibration:
    """Shared across requests; one per drafter."""

    def __init__(self, depth: int) -> None:
        """Args: depth: D, the deepest position."""
        self._seen = np.zeros((depth, BINS))
        self._accepted = np.zeros((depth, BINS))
        self._base, self._slope = np.zeros((depth, BINS)), np.ones((depth, BINS))
        self._stale = 0
        self._judged = np.zeros((2, ERROR_BINS, 3))  # of q and p: count, predicted, accepted
        self.observed = 0

    def probability(self, confidence: np.ndarray) -> np.ndarray:
        """p of the same shape [bs, D'] as the confidences; NaN counts as 0.

        Raises:
            ValueError: D' > depth.
        """
        self._check(confidence)
        return _probability(_floats(confidence), self._base, self._slope)

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """(base, slope), float64 [depth, BINS]: p = base + slope * q by position and bin of q."""
        return self._base, self._slope

    def survival(self, confidence: np.ndarray) -> np.ndarray:
        """[bs, D'] probability that a token and all before it are accepted."""
        return np.cumprod(self.probability(confidence), axis=1)

    def update(
        self,
        confidence: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
        chance: np.ndarray | None = None,
    ) -> None:
        """Learn from one round.

        Args:
            confidence: [bs, D'] as drafted.
            verified: [bs] drafted tokens that were verified.
            accepted: [bs] of them accepted.
            chance: [bs, D'] what :meth:`probability` made of them, if it was asked.

        Raises:
            ValueError: D' > depth.
        """
        if chance is None:
            chance = self.probability(confidence)
        self._check(confidence)
        self.observed += _count(
            _floats(confidence), _integers(verified), _integers(accepted),
            self._seen, self._accepted, chance, self._judged,
        )  # fmt: skip
        self._stale += 1
        if self._stale >= REFRESH_EVERY:
            _refresh(self._seen, self._accepted, self._base, self._slope)
            self._stale = 0

    def error(self) -> tuple[float, float]:
        """Expected calibration error of the confidences and of what was made of them.

        Both over the same judged positions, each predicted before its outcome was known, faded
        like the evidence; NaN before there were any.
        """
        count, predicted, accepted = np.moveaxis(self._judged, 2, 0)
        with np.errstate(invalid="ignore"):
            errors = np.abs(predicted - accepted).sum(axis=1) / count.sum(axis=1)
        return float(errors[0]), float(errors[1])

    def _check(self, confidence: np.ndarray) -> None:
        """Compiled loops do not check bounds."""
        if confidence.shape[1] > len(self._seen):
            raise ValueError(f"{confidence.shape[1]} positions, at most {len(self._seen)}")


def _floats(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float32)


def _integers(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)


@compiled
def _bin(value):
    """(confidence within 0..1, its bin); NaN is 0."""
    q = np.float64(value)
    if not q > 0.0:
        q = 0.0
    q = min(q, 1.0)
    return q, min(int(q * BINS), BINS - 1)


@compiled
def _probability(confidence, base, slope):
    chance = np.empty(confidence.shape)
    for request in range(confidence.shape[0]):
        for position in range(confidence.shape[1]):
            q, place = _bin(confidence[request, position])
            chance[request, position] = base[position, place] + slope[position, place] * q
    return chance


@compiled
def _count(confidence, verified, accepted, seen, hits, chance, judged):
    """Fade the old counts, add a round's; returns the observations it brought."""
    bs, depth = confidence.shape
    total = 0
    for request in range(bs):
        total += min(verified[request], accepted[request] + 1, depth)
    if total == 0:
        return 0
    fade = np.exp(-total / HORIZON)
    seen *= fade
    hits *= fade
    judged *= fade
    for request in range(bs):
        known = min(verified[request], accepted[request] + 1, depth)
        weight = 1.0
        if bs * REQUEST_SHARE > 1.0 and known > REQUEST_SHARE * total:
            weight = REQUEST_SHARE * total / known
        for position in range(known):
            q, place = _bin(confidence[request, position])
            for kind, value in enumerate((q, chance[request, position])):
                tenth = min(int(value * judged.shape[1]), judged.shape[1] - 1)
                judged[kind, tenth, 0] += 1.0
                judged[kind, tenth, 1] += value
                if position < accepted[request]:
                    judged[kind, tenth, 2] += 1.0
            seen[position, place] += weight
            if position < accepted[request]:
                hits[position, place] += weight
    return total


@compiled
def _refresh(seen, hits, base, slope):
    """Fold both levels into p = base + slope * q per position and bin.

    Coarse: (A_b + w q) / (N_b + w) over all positions; fine: (a + w coarse) / (n + w).
    """
    for place in range(seen.shape[1]):
        coarse = seen[:, place].sum() + WEIGHT
        prior = hits[:, place].sum() / coarse
        for position in range(seen.shape[0]):
            fine = seen[position, place] + WEIGHT
            base[position, place] = (hits[position, place] + WEIGHT * prior) / fine
            slope[position, place] = WEIGHT * WEIGHT / (coarse * fine)
