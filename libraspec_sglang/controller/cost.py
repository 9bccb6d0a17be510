"""What a round costs, learnt from the rounds themselves."""

from __future__ import annotations

import math

import numpy as np


class RowCost:
    """Seconds of a forward as a function of its rows: a straight line through recent rounds.

    Exponentially weighted least squares. Until rows have varied, the slope leans on a prior share
    of the mean time per row; a line learnt from the rounds in use is right around them, which is
    where decisions are made.
    """

    MEMORY = 300.0  # rounds
    PRIOR_ROWS = 2.0  # spread of rows, in rows, that the prior slope counts as
    OUTLIER = 3.0  # times the expected seconds; what is above is cut (another process, a page-in)

    def __init__(self, prior_share: float) -> None:
        """Args: prior_share: time of one more row, as a share of the mean forward."""
        self._share = prior_share
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0.0

    @property
    def rounds(self) -> float:
        """Observations, faded."""
        return self._weight

    def observe(self, rows: int, seconds: float) -> None:
        """One forward over ``rows`` rows took ``seconds``; what is not a time is ignored."""
        if not 0.0 <= seconds < math.inf:
            return
        if self._weight > 20.0:
            seconds = min(seconds, self.OUTLIER * float(self(rows)))
        keep = math.exp(-1.0 / self.MEMORY)
        self._weight = self._weight * keep + 1.0
        self._x = self._x * keep + rows
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + rows * rows
        self._xy = self._xy * keep + rows * seconds

    def line(self) -> tuple[float, float]:
        """(seconds at zero rows, seconds per row), neither negative."""
        if not self.known:
            return 1.0, self._share
        x, y = self._x / self._weight, self._y / self._weight
        spread = max(self._xx / self._weight - x * x, 0.0)
        joint = self._xy / self._weight - x * y
        prior = self.PRIOR_ROWS**2
        slope = (joint + prior * self._share * y) / (spread + prior)
        slope = min(max(slope, 0.0), y / max(x, 1.0))
        return y - slope * x, slope

    def __call__(self, rows: int | np.ndarray) -> float | np.ndarray:
        """Expected seconds; accepts an integer array."""
        start, slope = self.line()
        return start + slope * rows


class BatchCost:
    """A :class:`RowCost` for every batch size.

    A request costs something by itself (its context is read once however many rows it has), so one
    line through rounds of different batch sizes would charge that to the rows: here four times
    their real price. A batch size that has not been seen enough borrows the nearest one's line.
    """

    ENOUGH = 6.0  # rounds

    def __init__(self, prior_share: float) -> None:
        """Args: prior_share: as of :class:`RowCost`."""
        self._share = prior_share
        self._lines: dict[int, RowCost] = {}

    @property
    def known(self) -> bool:
        return bool(self._lines)

    def observe(self, batch: int, rows: int, seconds: float) -> None:
        """One forward for ``batch`` requests over ``rows`` rows took ``seconds``."""
        if batch not in self._lines:
            self._lines[batch] = RowCost(self._share)
        self._lines[batch].observe(rows, seconds)

    def at(self, batch: int) -> RowCost:
        """Seconds as a function of rows for this batch size."""
        own = self._lines.get(batch)
        if own is not None and own.rounds >= self.ENOUGH:
            return own
        seen = [b for b, line in self._lines.items() if line.rounds >= self.ENOUGH]
        if seen:
            return self._lines[min(seen, key=lambda b: abs(b - batch))]
        return own or RowCost(self._share)
