"""A JSON line per decode round: what was proposed, decided and accepted, and where time went.

No token ids and no text. The first line is a header with the format's version. Times are seconds
of host wall clock; on a CUDA device the clock waits for the device at every part, so that they are
execution times (and rounds a little slower).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TextIO

logger = logging.getLogger(__name__)

VERSION = 1


class RoundClock:
    """Seconds per part of one round, by the host's clock."""

    __slots__ = ("_last", "_wait", "laps", "rounds")

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        """Args: wait: returns once the device has done what it was given; None where the host
        does the work itself, or where times are not looked at."""
        self._wait = wait
        self.laps: dict[str, float] = {}
        self.rounds = 0  # begun so far
        self._last: float | None = None

    def start(self) -> float | None:
        """Begin a round; seconds since the last lap of the previous one, None after a pause."""
        now = self._now()
        gap = None if self._last is None else now - self._last
        self.laps = {}
        self.rounds += 1
        self._last = now
        return gap

    def pause(self) -> None:
        """Something else than a round happens next; the coming gap means nothing."""
        self._last = None

    def lap(self, name: str) -> None:
        """Book the time since the last lap under ``name``."""
        now = self._now()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        if self._wait is not None:
            self._wait()
        return time.perf_counter()


class TraceWriter:
    """Writes rounds to a JSONL file, begun anew; a full disk ends the trace, not the server."""

    def __init__(self, path: str, header: dict) -> None:
        # By the line: SGLang ends its scheduler with SIGKILL, and nothing would be flushed then.
        self._file: TextIO = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._failed = False
        self._write({"libraspec_trace": VERSION, **header})

    def round(
        self,
        *,
        requests: Sequence[str],
        verified: Sequence[int],
        gained: Sequence[int],
        context: Sequence[int],
        confidence: list[list[float]],
        laps: dict[str, float],
        gap: float | None = None,
    ) -> None:
        """Write one round.

        Args:
            requests: request ids, [bs].
            verified: rows per request, anchor included, [bs].
            gained: tokens gained per request, bonus included, [bs].
            context: committed tokens before the round, [bs].
            confidence: the drafter's confidences, [bs][D]; NaN at the end of a row, which the
                request did not draft, is left out.
            laps: seconds per part.
            gap: seconds since the round before, None after something else (a prefill).
        """
        self._write(
            {
                "requests": list(requests),
                "verified": list(verified),
                "gained": list(gained),
                "context": list(context),
                "confidence": [
                    [round(c, 4) for c in _drafted(row, rows - 1)]
                    for row, rows in zip(confidence, verified, strict=True)
                ],
                "seconds": {name: round(s, 7) for name, s in laps.items()},
                "gap": None if gap is None else round(gap, 7),
            }
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, row: dict) -> None:
        if self._failed:
            return
        try:
            self._file.write(json.dumps(row, allow_nan=True) + "\n")
        except OSError as error:
            self._failed = True
            logger.error("LibraSpec: the trace ends here (%s)", error)


def _drafted(row: list[float], verified: int) -> list[float]:
    end = len(row)
    while end > verified and math.isnan(row[end - 1]):
        end -= 1
    return row[:end]
