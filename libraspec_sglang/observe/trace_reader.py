"""Traces read back for :mod:`.replay`: as arrays, with what a trace cannot know filled in.

A round tells how far its draft would have been accepted only up to its first miss or, if there was
none, up to what it verified. Positions after that were drafted but never judged (censored). For
them acceptance is drawn, with a fixed seed, from probabilities fitted on the whole trace; how many
were drawn is counted. A trace recorded with ``--libraspec-policy static`` at full width needs
next to none.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .trace import VERSION

SEED = 20260808
BINS = 20
WEIGHT = 16.0
"""Observations the coarser estimate counts for in a bin of one position."""


class TraceError(ValueError):
    """A trace that cannot be used. The message names file, line and fault."""


@dataclass(frozen=True)
class Rounds:
    """T rounds of single requests, the rounds of a request together and in order.

    Attributes:
        confidence: float32 [T, D], 0 beyond what a round drafted.
        chance: float32 [T, D] probability that a token is accepted given that all before it were:
            the trace's own where it has them, else fitted.
        depth: int64 [T] tokens drafted, at least 1.
        reached: int64 [T] tokens that would be accepted were all drafted ones verified.
        context: int64 [T] committed tokens before the round.
        request: int64 [T] number of the request, from 0.
        notes: what a reader of the figures should know.
        imputed: positions whose acceptance was drawn, not observed.
        block_size: slots of the drafter's block, anchor included, where the trace says.
    """

    confidence: np.ndarray
    chance: np.ndarray
    depth: np.ndarray
    reached: np.ndarray
    context: np.ndarray
    request: np.ndarray
    imputed: int
    notes: list[str]
    block_size: int | None = None

    def __len__(self) -> int:
        return len(self.depth)


@dataclass
class _Columns:
    """Rounds as they are read, in the trace's order."""

    confidence: array = field(default_factory=lambda: array("f"))
    truth: array = field(default_factory=lambda: array("f"))
    depth: array = field(default_factory=lambda: array("q"))
    verified: array = field(default_factory=lambda: array("q"))
    accepted: array = field(default_factory=lambda: array("q"))
    context: array = field(default_factory=lambda: array("q"))
    request: array = field(default_factory=lambda: array("q"))
    numbers: dict[str, int] = field(default_factory=dict)
    plain: int = 0
    block_size: int | None = None


def read(path: str | Path) -> Rounds:
    """Read a trace.

    Besides what the server writes, a round may have ``probability``, [bs][D] like
    ``confidence``: the true chances, known where rounds were simulated.

    Raises:
        TraceError: not there, empty, not a trace, of a newer version, a malformed line, or without
            a round that drafted.
    """
    columns, notes, number = _Columns(), [], 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if number > 1 and not line.endswith("\n"):
                        notes.append(f"line {number}, the last, is cut off and was skipped")
                        break
                    raise TraceError(f"{path}:{number}: not JSON: {error}") from None
                if number == 1:
                    columns.block_size = _block_size(path, row)
                else:
                    _take(columns, row, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not columns.depth:
        where = f"{path}:{max(number, 1)}"
        if columns.plain:
            raise TraceError(
                f"{where}: none of its {columns.plain} rounds drafted anything; record one with "
                "--libraspec-policy static"
            )
        what = "a trace without rounds" if number else "an empty file"
        raise TraceError(f"{where}: {what}; record one with --libraspec-trace")
    if columns.plain:
        notes.append(f"{columns.plain} rounds without a draft say nothing here and were left out")
    return _arrays(columns, notes)


def _block_size(path: str | Path, row: Any) -> int | None:
    """The header's block size, once the header is found to be one."""
    version = row.get("libraspec_trace") if isinstance(row, dict) else None
    if type(version) is not int or version < 1:
        raise TraceError(f"{path}:1: not a LibraSpec trace: no 'libraspec_trace' version in it")
    if version > VERSION:
        raise TraceError(
            f"{path}:1: trace version {version} is newer than this program reads ({VERSION}); "
            "update libraspec-sglang"
        )
    block = row.get("block_size")
    if block is not None and (type(block) is not int or block < 2):
        raise TraceError(f"{path}:1: block_size {block!r} must be an integer of at least 2")
    return block


def _take(columns: _Columns, row: Any, where: str) -> None:
    """Add a line's requests; rows and gains include the anchor's and the bonus token."""
    try:
        lists = [row[k] for k in ("requests", "verified", "gained", "context", "confidence")]
        truth = row.get("probability") or [()] * len(lists[0])
        for name, rows, gained, context, confidence, chances in zip(*lists, truth, strict=True):
            if not 1 <= gained <= rows <= len(confidence) + 1:
                raise ValueError(
                    f"needs 1 <= gained <= verified <= drafted + 1, has {gained}, {rows} and "
                    f"{len(confidence) + 1}"
                )
            if context < 0:
                raise ValueError(f"context {context} is negative")
            if chances and len(chances) != len(confidence):
                raise ValueError("'probability' and 'confidence' differ in length")
            if not all(0.0 <= p <= 1.0 for p in chances):
                raise ValueError(f"'probability' must lie within 0 and 1, has {chances}")
            if not confidence:
                columns.plain += 1
                continue
            columns.confidence.extend(confidence)
            columns.truth.extend(chances)
            columns.depth.append(len(confidence))
            columns.verified.append(rows - 1)
            columns.accepted.append(gained - 1)
            columns.context.append(context)
            columns.request.append(columns.numbers.setdefault(str(name), len(columns.numbers)))
    except KeyError as error:
        raise TraceError(f"{where}: the round has no {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TraceError(f"{where}: malformed round: {error}") from None


def _arrays(columns: _Columns, notes: list[str]) -> Rounds:
    order = np.argsort(np.array(columns.request), kind="stable")
    depth = np.array(columns.depth)
    drafted = np.arange(depth.max()) < depth[:, None]
    confidence = _padded(columns.confidence, drafted)[order]
    known = len(columns.truth) == len(columns.confidence)
    truth = _padded(columns.truth, drafted)[order] if known else None
    if columns.truth and not known:
        notes.append("some rounds have no 'probability': those given are not used")
    depth, drafted, context, request, verified, accepted = (
        column[order]
        for column in (
            depth, drafted, np.array(columns.context), np.array(columns.request),
            np.array(columns.verified), np.array(columns.accepted),
        )
    )  # fmt: skip
    if truth is None:
        chance = _fitted(confidence, verified, accepted) * drafted
    else:
        chance = truth
        notes.append("acceptance probabilities are the trace's own")
    reached, imputed = _reached(chance, depth, verified, accepted)
    return Rounds(
        confidence, chance.astype(np.float32), depth, reached, context, request, imputed, notes,
        columns.block_size,
    )  # fmt: skip


def _padded(values: array, drafted: np.ndarray) -> np.ndarray:
    """float32 [T, D] from the rounds' values in a row; 0 where nothing was drafted and for NaN."""
    padded = np.zeros(drafted.shape, dtype=np.float32)
    padded[drafted] = np.nan_to_num(np.array(values), nan=0.0).clip(0.0, 1.0)
    return padded


def _fitted(confidence: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """float64 [T, D]: p(accepted | confidence, position) by counting over the whole trace.

    A bin of confidences at one position leans on the same bin over all positions, and that on the
    confidence itself, so bins without evidence return it.
    """
    depth = confidence.shape[1]
    position = np.arange(depth)
    judged = position < np.minimum(verified, accepted + 1)[:, None]
    place = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    cell = place + BINS * position
    hits = judged & (position < accepted[:, None])
    seen = np.bincount(cell[judged], minlength=depth * BINS).reshape(depth, BINS)
    kept = np.bincount(cell[hits], minlength=depth * BINS).reshape(depth, BINS)
    coarse = seen.sum(0) + WEIGHT
    fine = seen + WEIGHT
    base = (kept + WEIGHT * kept.sum(0) / coarse) / fine
    slope = WEIGHT * WEIGHT / (coarse * fine)
    return base.ravel()[cell] + slope.ravel()[cell] * confidence


def _reached(
    chance: np.ndarray, depth: np.ndarray, verified: np.ndarray, accepted: np.ndarray
) -> tuple[np.ndarray, int]:
    """(accepted tokens had all been verified [T], positions drawn for it).

    Only a round in which everything verified was accepted leaves something to draw, from there to
    the first miss.
    """
    reached = accepted.copy()
    open_ended = np.flatnonzero((accepted == verified) & (verified < depth))
    draws = np.random.default_rng(SEED).random((len(open_ended), chance.shape[1]))
    position = np.arange(chance.shape[1])
    passed = (draws < chance[open_ended]) | (position < verified[open_ended, None])
    passed &= position < depth[open_ended, None]
    reached[open_ended] = passed.cumprod(axis=1).sum(axis=1)
    judged = np.minimum(reached + 1, depth)[open_ended]  # the miss was drawn too
    return reached, int((judged - verified[open_ended]).sum())
