"""What a round costs, learnt from the rounds themselves, on a profile's shape if there is one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Profile = Callable[[int, np.ndarray], np.ndarray]
"""(requests, rows [n]) -> seconds [n], of any shape: flats, steps, slopes."""


class LineCost:
    """Seconds of a forward as a straight line in x, through recent rounds.

    Exponentially weighted least squares. Until x has varied, the slope leans on a prior. A line
    learnt from the rounds in use is right around them, which is where decisions are made.
    """

    MEMORY = 300.0  # rounds
    OUTLIER = 3.0  # times the expected seconds; what is above is cut (another process, a page-in)

    def __init__(self, prior_share: float, prior_spread: float) -> None:
        """Args:
        prior_share: slope assumed, as a share of the mean seconds per unit of x; 0: of the mean
            of x, which is a line through the origin.
        prior_spread: spread of x that the prior slope counts as; in the mean x where
            ``prior_share`` is 0.
        """
        self._share, self._spread = prior_share, prior_spread
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def rounds(self) -> float:
        """Observations, faded."""
        return self._weight

    def observe(self, x: float, seconds: float) -> None:
        """One forward at ``x`` took ``seconds``; what is not a time is ignored."""
        if not 0.0 <= seconds < math.inf:
            return
        if self._weight > 20.0:
            start, slope = self.line()
            seconds = min(seconds, self.OUTLIER * (start + slope * x))
        keep = math.exp(-1.0 / self.MEMORY)
        self._weight = self._weight * keep + 1.0
        self._x = self._x * keep + x
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * seconds

    def line(self) -> tuple[float, float]:
        """(seconds at x = 0, seconds per x), the slope never negative nor above mean y / mean x."""
        x, y = self._x / self._weight, self._y / self._weight
        varied = max(self._xx / self._weight - x * x, 0.0)
        joint = self._xy / self._weight - x * y
        through_origin = y / max(x, 1e-12)
        if self._share:
            prior, assumed = self._spread**2, self._share * y
        else:
            prior, assumed = (self._spread * x) ** 2, through_origin
        slope = (joint + prior * assumed) / max(varied + prior, 1e-300)
        slope = min(max(slope, 0.0), through_origin)
        return y - slope * x, slope


class BatchCost:
    """Seconds of a forward by rows, for every batch size.

    A request costs something by itself (its context is read once however many rows it has), so one
    line through rounds of different batch sizes would charge that to the rows: here four times
    their real price. A batch size that has not been seen enough borrows the nearest one's line.

    Without a profile x is the rows. With one it is the profile's seconds for them: the shape is
    the profile's, and rounds only stretch and shift it (another load, a longer context).
    """

    ENOUGH = 6.0  # rounds
    PRIOR_ROWS, PRIOR_PROFILE = 2.0, 0.5  # spreads that the priors count as

    def __init__(self, prior_share: float, depth: int, profile: Profile | None = None) -> None:
        """Args:
        prior_share: time of one more row, as a share of the mean forward; without a profile.
        depth: rows a request has at most beside its own.
        profile: of this forward.
        """
        self._share, self._depth, self._profile = prior_share, depth, profile
        self._lines: dict[int, LineCost] = {}
        self._shapes: dict[int, np.ndarray] = {}

    @property
    def known(self) -> bool:
        """Whether anything but the prior's proportions is known."""
        return bool(self._lines) or self._profile is not None

    def observe(self, batch: int, rows: int, seconds: float) -> None:
        """One forward for ``batch`` requests over ``rows`` rows took ``seconds``."""
        line = self._lines.get(batch)
        if line is None:
            line = self._lines[batch] = (
                LineCost(self._share, self.PRIOR_ROWS)
                if self._profile is None
                else LineCost(0.0, self.PRIOR_PROFILE)
            )
        line.observe(float(self._shape(batch)[rows]), seconds)

    def seconds(self, batch: int) -> np.ndarray:
        """float64 [batch (depth + 1) + 1]: seconds by rows, what is not a round's rows included."""
        start, slope = self._line(batch)
        return start + slope * self._shape(batch)

    def _line(self, batch: int) -> tuple[float, float]:
        own = self._lines.get(batch)
        if own is not None and own.rounds >= self.ENOUGH:
            return own.line()
        seen = [b for b, line in self._lines.items() if line.rounds >= self.ENOUGH]
        if seen:
            return self._lines[min(seen, key=lambda b: abs(b - batch))].line()
        if self._profile is not None:
            return 0.0, 1.0
        return own.line() if own is not None and own.rounds else (1.0, self._share)

    def _shape(self, batch: int) -> np.ndarray:
        shape = self._shapes.get(batch)
        if shape is None:
            rows = np.arange(batch * (self._depth + 1) + 1, dtype=np.float64)
            shape = rows if self._profile is None else self._profile(batch, rows)
            self._shapes[batch] = shape
        return shape
