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
from .cost import RowCost

CURVES_PER_REQUEST = 4
CURVES_SHARED = 32
REQUESTS_REMEMBERED = 1024
FIRST_PROBE, LAST_PROBE = 4, 64
"""Rounds of plain decoding before the next trial draft: first, and at most."""
MARGIN = 0.02
"""Expected gain in rate below which the width stays as it is."""


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
        self.verify_cost = RowCost(prior_share=0.01)
        self.draft_cost = RowCost(prior_share=0.01)
        self.elsewhere = 0.0
        self._widths = np.array(draft_widths(block_size, max_length))
        self._width = min(block_size, max_length)
        self._shared: deque[np.ndarray] = deque(maxlen=CURVES_SHARED)
        self._own: OrderedDict[Hashable, deque[np.ndarray]] = OrderedDict()
        self._probe_in, self._probe_gap = 0, FIRST_PROBE

    # -- decisions -----------------------------------------------------------------------

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        """Tokens to draft for each request this round.

        Args:
            requests: keys of the requests in the batch, one use per request (never reused).
            cap: the longest length any of them may verify.
        """
        if not self._shared or not self.verify_cost.known:
            return min(self._width, cap)
        width = self._best_width(requests)
        if width:
            self._probe_in, self._probe_gap = 0, FIRST_PROBE
        else:
            self._probe_in -= 1
            if self._probe_in > 0:
                self._width = 0
                return 0
            if self._width == 0:  # a trial that is due, not the first plain round
                self._probe_gap = min(self._probe_gap * 2, LAST_PROBE)
                width = int(self._widths[1])
            self._probe_in = self._probe_gap
        self._width = width
        return min(width, cap)

    def decide(self, confidence: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """Lengths to verify.

        Args:
            confidence: [bs, D] of this round's draft.
            caps: [bs] largest length per request.

        Returns:
            int64 [bs].
        """
        bs, depth = confidence.shape
        spent = self.elsewhere + float(self.draft_cost(bs * (depth + 1)))
        return allocate(self.calibration.survival(confidence), self.verify_cost, caps, spent)

    def _best_width(self, requests: Sequence[Hashable]) -> int:
        """The width with the best expected rate over recent survival curves."""
        bs = len(requests)
        curves = [c for r in requests for c in self._own.get(r, self._shared)]
        survival = np.stack(curves)  # [n, D]
        start, slope = self.verify_cost.line()
        plain = bs / (self.elsewhere + start + slope * bs)
        # A token is verified when its survival pays for its row at the current rate. Two passes
        # settle the rate well enough.
        rate = plain
        for _ in range(2):
            pays = survival > slope * rate
            gain = np.concatenate(([0.0], np.cumsum((survival * pays).mean(0))))[self._widths]
            rows = np.concatenate(([0.0], np.cumsum(pays.mean(0))))[self._widths]
            draft = np.where(self._widths > 0, self.draft_cost(bs * (self._widths + 1)), 0.0)
            verify = start + slope * bs * (1.0 + rows)
            rates = bs * (1.0 + gain) / (self.elsewhere + draft + verify)
            rate = float(rates.max())
        best = int(rates.argmax())
        current = np.flatnonzero(self._widths == self._width)
        if current.size and rates[best] < rates[current[0]] * (1.0 + MARGIN):
            return self._width
        return int(self._widths[best])

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
        survival = self._extended(self.calibration.survival(confidence))
        self.calibration.update(confidence, verified, accepted)
        for request, curve in zip(requests, survival, strict=True):
            own = self._own.get(request)
            if own is None:
                own = self._own[request] = deque(maxlen=CURVES_PER_REQUEST)
                if len(self._own) > REQUESTS_REMEMBERED:
                    self._own.popitem(last=False)
            own.append(curve)
            self._shared.append(curve)

    def learn_times(
        self, draft_rows: int, draft_seconds: float, verify_rows: int, verify_seconds: float
    ) -> None:
        """Take in where a round's time went; zero draft rows after a plain round."""
        if draft_rows:
            self.draft_cost.observe(draft_rows, draft_seconds)
        self.verify_cost.observe(verify_rows, verify_seconds)

    def learn_elsewhere(self, seconds: float) -> None:
        """Seconds a round spent outside both forwards (scheduling, bookkeeping)."""
        if not self.elsewhere:
            self.elsewhere = seconds
        self.elsewhere += 0.02 * (min(seconds, 3.0 * self.elsewhere) - self.elsewhere)

    def _extended(self, survival: np.ndarray) -> np.ndarray:
        """Curves to the full depth: beyond what was drafted they fall as over the last step."""
        bs, depth = survival.shape
        if depth == self.max_length:
            return survival
        before = survival[:, -2] if depth > 1 else np.ones(bs)
        step = survival[:, -1] / np.maximum(before, 1e-9)
        more = np.arange(1, self.max_length - depth + 1)
        tail = survival[:, -1:] * step[:, None] ** more
        return np.concatenate([survival, tail], axis=1)


def draft_widths(block_size: int, max_length: int) -> list[int]:
    """Widths worth choosing between: none, then growing steps, the block and the maximum."""
    steps = {1, 2, 3, 5, 7, 11, 15, 19, 23, 31, 47, block_size, max_length}
    return [0, *sorted(s for s in steps if s <= max_length)]
