"""``libra``: lengths from measured cost and calibrated survival, for the whole batch.

Where the paper puts the cost of verification into one number (alpha), this policy measures it: the
time of the target's forward and of the drafter's pass as functions of their rows, and the time a
round spends elsewhere. Each round it decides two things.

1. *How wide to draft*, before drafting. Recent survival curves of the requests in the batch say
   what a pass of each width would have brought; the width with the best expected rate is used.
   Zero is a width: plain decoding. While it is chosen, a draft is tried now and then (further and
   further apart) to see whether the text has become predictable.
2. *How many tokens to verify*, after drafting: :func:`batch.allocate` on the calibrated survivals.

Everything is host arithmetic on small arrays; the confidences come to the host anyway, with the
lengths the verification layout needs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

import numpy as np

from .batch import allocate
from .calibration import Calibration
from .cost import BatchCost

CURVES_PER_REQUEST, CURVES_SHARED = 4, 16
REQUESTS_REMEMBERED = 1024
FIRST_PROBE, LAST_PROBE = 4, 64
"""Rounds of plain decoding before the next trial draft: first, and at most."""
EXPLORE_EVERY, EXPLORE_BY = 16, 2.0
"""How often a draft is made wider than what pays by what is known, and how many times as wide.
A narrow draft says nothing about the positions beyond it."""
PROBE_WIDTH = 3
"""Tokens of a trial draft."""
WIDTH_EVERY = 3
"""Rounds a chosen width stands, while the batch is of the same size."""
MARGIN = 0.01
"""Expected gain in rate below which the width stays as it is."""
UNSEEN = 0.8
"""Chance of acceptance assumed for positions no draft has reached yet."""
OWN_PACE, SHARED_PACE = 0.3, 0.05
"""How fast the chances beyond a draft follow what deeper drafts showed."""


class Libra:
    """The policy's state. Not thread-safe: one per worker."""

    name = "libra"

    def __init__(self, block_size: int, max_length: int) -> None:
        """Args:
        block_size: n, tokens a trained block drafts; the first width tried.
        max_length: d_max.
        """
        self.max_length = max_length
        self.calibration = Calibration(max_length)
        self.verify_cost = BatchCost(prior_share=0.01)
        self.draft_cost = BatchCost(prior_share=0.01)
        self.elsewhere = 0.0
        self._widths = np.arange(max_length + 1)
        self._width = min(block_size, max_length)
        self._memory = _Memory(max_length)
        self._chance: np.ndarray | None = None
        self._probe_in, self._probe_gap = 0, FIRST_PROBE
        self._explore_in = EXPLORE_EVERY
        self._settled = self._batch = 0

    # -- decisions -----------------------------------------------------------------------

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        """Tokens to draft for each request this round.

        Args:
            requests: keys of the requests in the batch, one use per request (never reused).
            cap: the longest length any of them may verify.
        """
        if not self.verify_cost.known:
            return min(self._width, cap)
        if self._settled > 0 and self._width and len(requests) == self._batch:
            self._settled -= 1
            best = self._width
        else:
            best = self._best_width(requests)
            self._settled, self._batch = WIDTH_EVERY - 1, len(requests)
        return min(self._explored(best) if best else self._probed(), cap)

    def _explored(self, width: int) -> int:
        """A width that pays, or now and then one that may show that a wider one would."""
        self._width = width
        self._probe_in, self._probe_gap = 0, FIRST_PROBE
        self._explore_in -= 1
        if self._explore_in > 0:
            return width
        self._explore_in = EXPLORE_EVERY
        return min(int(width * EXPLORE_BY) + 1, self.max_length)

    def _probed(self) -> int:
        """Plain decoding, with a trial draft now and then, further and further apart."""
        self._probe_in -= 1
        if self._width and self._probe_in <= 0:  # the first plain round
            self._width, self._probe_in = 0, self._probe_gap
        if self._probe_in > 0:
            return 0
        self._probe_gap = min(self._probe_gap * 2, LAST_PROBE)
        self._probe_in = self._probe_gap
        return min(PROBE_WIDTH, self.max_length)

    def decide(self, confidence: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """Lengths to verify.

        Args:
            confidence: [bs, D] of this round's draft.
            caps: [bs] largest length per request.

        Returns:
            int64 [bs].
        """
        bs, depth = confidence.shape
        if bs == 1:
            return np.array([self._decide_one(confidence[0].tolist(), int(caps[0]))])
        spent = self.elsewhere + float(self.draft_cost.at(bs)(bs * (depth + 1)))
        self._chance = self.calibration.probability(confidence)
        return allocate(np.cumprod(self._chance, axis=1), self.verify_cost.at(bs), caps, spent)

    def _decide_one(self, confidence: list[float], cap: int) -> int:
        """One request's length: the same peak, in plain Python, where arrays are slower."""
        chance = self.calibration.chances(confidence)
        self._chance = np.array([chance])
        start, slope = self.verify_cost.at(1).line()
        draft = float(self.draft_cost.at(1)(len(chance) + 1))
        seconds = self.elsewhere + draft + start + slope
        survival = tokens = 1.0
        best, length = tokens / seconds, 0
        for depth, p in enumerate(chance[:cap], 1):
            survival *= p
            tokens += survival
            seconds += slope
            if tokens > best * seconds:
                best, length = tokens / seconds, depth
        return length

    def _best_width(self, requests: Sequence[Hashable]) -> int:
        """The width with the best expected rate over recent survival curves."""
        bs = len(requests)
        survival = self._memory.curves_of(requests)  # [n, D]
        start, slope = self.verify_cost.at(bs).line()
        draft_cost = self.draft_cost.at(bs)
        plain = bs / (self.elsewhere + start + slope * bs)
        # A token is verified when its survival pays for its row at the current rate. Two passes
        # settle the rate well enough.
        rate = plain
        for _ in range(2):
            pays = survival > slope * rate
            gain = np.concatenate(([0.0], np.cumsum((survival * pays).mean(0))))
            rows = np.concatenate(([0.0], np.cumsum(pays.mean(0))))
            draft = np.where(self._widths > 0, draft_cost(bs * (self._widths + 1)), 0.0)
            verify = start + slope * bs * (1.0 + rows)
            rates = bs * (1.0 + gain) / (self.elsewhere + draft + verify)
            rate = float(rates.max())
        best = int(rates.argmax())
        return self._width if rates[best] < rates[self._width] * (1.0 + MARGIN) else best

    # -- learning ------------------------------------------------------------------------

    def learn(
        self,
        requests: Sequence[Hashable],
        confidence: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Take in a round's outcome.

        Args:
            requests: as in :meth:`first_draft`.
            confidence: [bs, D] of the round's draft, D = 0 after a plain round.
            verified: [bs] drafted tokens verified.
            accepted: [bs] of them accepted.
        """
        if not confidence.shape[1]:
            return
        chance, self._chance = self._chance, None
        if chance is None:  # lengths were not ours to decide this round
            chance = self.calibration.probability(confidence)
        if len(requests) == 1:
            self.calibration.update_one(confidence[0].tolist(), int(verified[0]), int(accepted[0]))
        else:
            self.calibration.update(confidence, verified, accepted)
        self._memory.take(requests, chance)

    def learn_times(
        self,
        batch: int,
        draft_rows: int,
        draft_seconds: float,
        verify_rows: int,
        verify_seconds: float,
    ) -> None:
        """Take in where a round of ``batch`` requests spent time; no draft rows if plain."""
        if draft_rows:
            self.draft_cost.observe(batch, draft_rows, draft_seconds)
        self.verify_cost.observe(batch, verify_rows, verify_seconds)

    def learn_elsewhere(self, seconds: float) -> None:
        """Seconds a round spent outside both forwards (scheduling, bookkeeping)."""
        if not self.elsewhere:
            self.elsewhere = seconds
        self.elsewhere += 0.02 * (min(seconds, 3.0 * self.elsewhere) - self.elsewhere)


class _Memory:
    """Recent survival curves of each request, to full depth.

    A curve is what a draft's calibrated chances multiply to; beyond the draft it goes on with the
    chances that deeper drafts of the same request showed. Requests are rows of dense arrays, so a
    round costs a fixed number of array operations whatever its batch size.
    """

    def __init__(self, depth: int) -> None:
        self._row: OrderedDict[Hashable, int] = OrderedDict()
        self._beyond = np.full((REQUESTS_REMEMBERED, depth), UNSEEN)
        """Chance that position d is accepted when all before it are."""
        self._curves = np.zeros((REQUESTS_REMEMBERED, CURVES_PER_REQUEST, depth))
        self._next = np.zeros(REQUESTS_REMEMBERED, dtype=np.int64)
        self._typical = np.full(depth, UNSEEN)  # what a new request starts from
        self._recent: deque[np.ndarray] = deque(maxlen=CURVES_SHARED)  # anyone's

    def __len__(self) -> int:
        return len(self._row)

    def curves_of(self, requests: Sequence[Hashable]) -> np.ndarray:
        """[n, D] the latest curves of these requests, and of all: four curves alone are few."""
        depth = self._typical.shape[0]
        own = self._curves[self._rows(requests)].reshape(-1, depth)
        return np.concatenate([own, *self._recent]) if self._recent else own

    def take(self, requests: Sequence[Hashable], chance: np.ndarray) -> None:
        """Add a draft: calibrated chances [bs, D'], D' <= D.

        A position teaches in the measure that it was likely to be reached.
        """
        rows, depth = self._rows(requests), chance.shape[1]
        beyond = self._beyond[rows]
        curves = np.cumprod(np.concatenate([chance, beyond[:, depth:]], axis=1), axis=1)
        reached = np.ones_like(chance)
        reached[:, 1:] = curves[:, : depth - 1]
        beyond[:, :depth] += OWN_PACE * reached * (chance - beyond[:, :depth])
        self._beyond[rows] = beyond
        self._curves[rows, self._next[rows]] = curves
        self._next[rows] = (self._next[rows] + 1) % CURVES_PER_REQUEST
        self._recent.append(curves[:CURVES_PER_REQUEST])
        typical = self._typical[:depth]
        typical += SHARED_PACE * (reached * (chance - typical)).mean(axis=0)

    def _rows(self, requests: Sequence[Hashable]) -> np.ndarray:
        return np.fromiter(map(self._place, requests), dtype=np.int64, count=len(requests))

    def _place(self, request: Hashable) -> int:
        row = self._row.get(request)
        if row is None:
            if len(self._row) < REQUESTS_REMEMBERED:
                row = len(self._row)
            else:
                row = self._row.popitem(last=False)[1]  # the oldest
            self._row[request] = row
            self._beyond[row] = self._typical
            self._curves[row] = np.cumprod(self._typical)
        return row
