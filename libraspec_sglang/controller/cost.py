"""What a round costs, learnt from the rounds themselves, on a profile's shape if there is one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Profile = Callable[[int, np.ndarray], np.ndarray]
"""(requests, rows [n]) -> seconds [n], of any shape: flats, steps, slopes."""


class Elsewhere:
    """Seconds of a round outside both forwards by batch size, and the machine's pace they tell.

    The work is the same in every round, so a round in which it takes longer than usual was one of
    a slower machine (a neighbour's load, the clock). Forwards slow down with it: here by the same
    factor, with a correlation of 0.8 to 0.98 over six rounds, and by up to two for seconds at a
    time, which without this would look like the price of whatever was drafted then.
    """

    OUTLIER = 2.0  # times the usual
    YOUNG = 20  # rounds
    NOW, USUAL = 0.3, 0.02  # how fast the pace and the usual follow

    def __init__(self, start: float = 0.0) -> None:
        """Args: start: seconds to begin with."""
        self.pace = 1.0
        """Seconds now over seconds usually, for whatever the machine does."""
        self._start = start
        self._usual: dict[int, float] = {}
        self._rounds: dict[int, int] = {}

    def observe(self, batch: int, seconds: float) -> None:
        """A round of ``batch`` requests took ``seconds`` there; what is not a time is ignored."""
        if not 0.0 < seconds < math.inf:
            return
        rounds, usual = self._rounds.get(batch, 0) + 1, self._usual.get(batch, seconds)
        if rounds <= self.YOUNG and seconds < usual / self.OUTLIER**2:  # the first were outliers
            rounds, usual = 1, seconds
        self._rounds[batch] = rounds
        ratio = min(max(seconds / usual, 1.0 / self.OUTLIER), self.OUTLIER)
        self._usual[batch] = usual * (1.0 + max(1.0 / rounds, self.USUAL) * (ratio - 1.0))
        self.pace += self.NOW * (ratio - self.pace)

    def seconds(self, batch: int) -> float:
        """Usual seconds; those of the nearest batch size seen."""
        if not self._usual:
            return self._start
        if batch in self._usual:
            return self._usual[batch]
        return self._usual[min(self._usual, key=lambda b: abs(b - batch))]


class LineCost:
    """Seconds of a forward as a straight line in x, through recent rounds.

    Exponentially weighted least squares. Until x has varied, the slope leans on a prior. A line
    learnt from the rounds in use is right around them, which is where decisions are made.
    """

    MEMORY = 300.0  # rounds
    PRIOR = 20.0  # rounds that the prior counts as
    OUTLIER = 3.0  # times the expected seconds; what is above is cut (a first compile, a page-in)

    def __init__(self, prior_share: float, prior_spread: float) -> None:
        """Args:
        prior_share: slope assumed, as a share of the mean seconds per unit of x; 0: x is the
            seconds expected, and the line goes through the origin.
        prior_spread: spread of x that the prior slope counts as; in the mean x where
            ``prior_share`` is 0.
        """
        self._share, self._spread = prior_share, prior_spread
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.rounds = 0
        """Observations, however long ago."""

    def observe(self, x: float, seconds: float) -> None:
        """One forward at ``x`` took ``seconds``; what is not a time is ignored."""
        if not 0.0 < seconds < math.inf:
            return
        least, most = self._expected(x)
        if seconds * self.OUTLIER < least:  # the first were outliers: no load speeds up
            self._weight = self._x = self._y = self._xx = self._xy = 0.0
            self.rounds = 0
            most = self._expected(x)[1]
        seconds = min(seconds, self.OUTLIER * most)
        self.fade()
        self.rounds += 1
        self._weight += 1.0
        self._x += x
        self._y += seconds
        self._xx += x * x
        self._xy += x * seconds

    def _expected(self, x: float) -> tuple[float, float]:
        """(least, most) seconds at ``x`` of any line that what is known leaves possible."""
        if not self._weight:
            return 0.0, math.inf if self._share else x
        if self._weight > self.PRIOR:
            start, slope = self.line()
            return 0.0, start + slope * x
        mean_x, y = self.mean()
        through_origin = y * x / max(mean_x, 1e-12)
        return min(y, through_origin), max(y, through_origin)

    def fade(self) -> None:
        """A round that says nothing about this line has gone by; the last one's worth stays."""
        if self._weight <= 1.0:
            return
        keep = math.exp(-1.0 / self.MEMORY)
        self._weight *= keep
        self._x *= keep
        self._y *= keep
        self._xx *= keep
        self._xy *= keep

    def mean(self) -> tuple[float, float]:
        """(x, seconds) of recent rounds."""
        return self._x / self._weight, self._y / self._weight

    def line(self, assumed: float | None = None) -> tuple[float, float]:
        """(seconds at x = 0, seconds per x), the slope never negative nor above mean y / mean x.

        Args:
            assumed: a slope likelier than the prior's, for as long as x has not varied.
        """
        x, y = self.mean()
        varied = max(self._xx / self._weight - x * x, 0.0)
        joint = self._xy / self._weight - x * y
        through_origin = y / max(x, 1e-12)
        rounds = self.PRIOR / self._weight
        if self._share:
            prior = rounds * self._spread**2
            assumed = self._share * y if assumed is None else assumed
        else:
            prior, assumed = rounds * (self._spread * x) ** 2, through_origin
        slope = (joint + prior * assumed) / max(varied + prior, 1e-300)
        slope = min(max(slope, 0.0), through_origin)
        return y - slope * x, slope


class BatchCost:
    """Seconds of a forward by rows, for every batch size.

    A request costs something by itself (its context is read once however many rows it has), so one
    line through rounds of different batch sizes would charge that to the rows: here four times
    their real price. A batch size that has not been seen enough borrows the nearest one's line.

    A round of one row for each request is plain decoding, which has kernels of its own: its price
    is a mean of its own, since the line through the other rounds says too much for it. For as long
    as those have not varied, the way from plain to them tells the slope.

    Without a profile x is the rows. With one it is the profile's seconds for them: the shape is
    the profile's, and rounds only stretch and shift it (another load, a longer context).
    """

    ENOUGH = 6  # rounds
    PRIOR_ROWS, PRIOR_PROFILE = 2.0, 0.5  # spreads that the priors count as

    def __init__(self, prior_share: float, depth: int, profile: Profile | None = None) -> None:
        """Args:
        prior_share: time of one more row, as a share of the mean forward; without a profile.
        depth: rows a request has at most beside its own.
        profile: of this forward.
        """
        self._share, self._depth, self._profile = prior_share, depth, profile
        self.tiers: np.ndarray | None = None
        """Rows that passes are padded to, ascending, where they are; more than the last are not."""
        self._drafted: dict[int, LineCost] = {}
        self._plain: dict[int, LineCost] = {}
        self._shapes: dict[int, np.ndarray] = {}

    @property
    def known(self) -> bool:
        """Whether anything but the prior's proportions is known."""
        return bool(self._drafted) or self._profile is not None

    def observe(self, batch: int, rows: int, seconds: float) -> None:
        """One forward for ``batch`` requests over ``rows`` rows took ``seconds``."""
        if batch not in self._drafted:
            self._drafted[batch], self._plain[batch] = self._new(), self._new()
        own, other = self._drafted[batch], self._plain[batch]
        if rows == batch:
            own, other = other, own
        own.observe(float(self._shape(batch)[rows]), seconds)
        other.fade()

    def seconds(self, batch: int) -> np.ndarray:
        """float64 [batch (depth + 1) + 1]: seconds by rows, what is not a round's rows included."""
        shape, start, slope, plain = self.curve(batch)
        seconds = start + slope * shape
        seconds[batch] = plain
        return seconds

    def curve(self, batch: int) -> tuple[np.ndarray, float, float, float]:
        """(x by rows [batch (depth + 1) + 1], start, slope, seconds of plain decoding).

        Rows beyond plain decoding's take start + slope * x[rows].
        """
        start, slope = self._line(batch)
        shape = self._shape(batch)
        seconds = start + slope * float(shape[batch])
        plain = self._plain.get(batch)
        if plain is not None and plain.rounds:
            seconds = plain.mean()[1]
        elif (near := self._nearest(batch, self._plain, 1)) is not None:
            near_start, near_slope = self._line(near)
            x, mean = self._plain[near].mean()
            seconds *= mean / max(near_start + near_slope * x, 1e-12)
        if self._depth:  # a row more is never cheaper
            seconds = min(seconds, start + slope * float(shape[batch + 1]))
        return shape, start, slope, seconds

    def _line(self, batch: int) -> tuple[float, float]:
        near = self._nearest(batch, self._drafted, self.ENOUGH)
        if near is None and self._profile is not None:
            return 0.0, 1.0
        if near is None:
            near = self._nearest(batch, self._drafted, 1)
        if near is None:
            near = self._nearest(batch, self._plain, 1)
            return (1.0, self._share) if near is None else self._plain[near].line()
        return self._drafted[near].line(self._way_from_plain(near))

    def _way_from_plain(self, batch: int) -> float | None:
        """Seconds per x between plain rounds and the others."""
        plain = self._plain[batch]
        if not plain.rounds:
            return None
        (x, seconds), (plain_x, plain_seconds) = self._drafted[batch].mean(), plain.mean()
        return max(seconds - plain_seconds, 0.0) / max(x - plain_x, 1e-12)

    def _new(self) -> LineCost:
        if self._profile is None:
            return LineCost(self._share, self.PRIOR_ROWS)
        return LineCost(0.0, self.PRIOR_PROFILE)

    @staticmethod
    def _nearest(batch: int, lines: dict[int, LineCost], rounds: int) -> int | None:
        """The batch size seen for so many rounds that is nearest to ``batch``."""
        if batch in lines and lines[batch].rounds >= rounds:
            return batch
        seen = [b for b, line in lines.items() if line.rounds >= rounds]
        return min(seen, key=lambda b: abs(b - batch), default=None)

    def _shape(self, batch: int) -> np.ndarray:
        shape = self._shapes.get(batch)
        if shape is None:
            rows = np.arange(batch * (self._depth + 1) + 1, dtype=np.float64)
            if self.tiers is not None:
                place = np.searchsorted(self.tiers, rows)
                tiered = place < len(self.tiers)
                rows[tiered] = self.tiers[place[tiered]]
            shape = rows if self._profile is None else self._profile(batch, rows)
            self._shapes[batch] = shape
        return shape
