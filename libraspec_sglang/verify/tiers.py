"""Sizes of the target passes that are captured as CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def token_tiers(most: int) -> list[int]:
    """Numbers of rows to capture a graph for, ascending: every number to 8, then 4 an octave.

    A pass over ``n`` rows replays the first tier that holds them, so at most a fifth of a pass is
    padding, and one request alone has a tier for about every length it may verify. The number of
    graphs grows with the logarithm of ``most``: 41 for 2,560 rows.

    Args:
        most: rows of the largest pass, at least 1; the last tier.
    """
    tiers, step, tier = [], 1, 0
    while tier < most:
        tier += step
        tiers.append(min(tier, most))
        if tier == 8 * step:
            step *= 2
    return tiers


def tier_of(rows: int, tiers: Sequence[int]) -> int | None:
    """The smallest tier that holds ``rows``; None above the last."""
    place = bisect_left(tiers, rows)
    return tiers[place] if place < len(tiers) else None
