"""What rounds cost on this machine with this pair, measured in a real engine and fitted.

One LIBRASPEC engine decodes real prompts with every batch size and length of a grid, at a short and
a long context, and its trace says how long the parts of each round took. Rounds of one shape are
summed up by their median. The fit is a table of seconds by rows that never falls (any steps and
flats the points show), plus a price per request, per token of context, and per row and token of
its context, none negative: non-negative least squares on relative errors.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls
from tqdm import tqdm

from libraspec_sglang.controller.cost_file import Cost, Forward, Profile
from libraspec_sglang.demo.runner import Batch, EngineProcess

LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Drafted tokens verified per request, up to the longest that is asked for."""
ROUNDS, FEWER_ROUNDS, LEAST_ROUNDS = 16, 10, 5
"""Rounds of a cell, about; of one that takes long; and rounds of one shape that make a point."""
CELL_SECONDS = 3.0
"""What a cell may take before it gets fewer rounds."""
VERSIONS = ("libraspec-sglang", "sglang", "torch", "flashinfer-python")

Point = tuple[int, int, int, float]
"""(requests, rows, context tokens of all requests, seconds)."""


class ProfileError(RuntimeError):
    """The machine could not be measured. The message says why."""


@dataclass(frozen=True)
class Cell:
    """Rounds to be run: ``batch`` requests that verify ``length`` drafted tokens each."""

    batch: int
    length: int
    context: int


def grid(batches: Sequence[int], longest: int, most_rows: int, contexts: Sequence[int]):
    """The cells, dear ones last; the long context for a few lengths only.

    Args:
        batches: requests at once.
        longest: drafted tokens at most.
        most_rows: rows of a whole round at most.
        contexts: prompt tokens, short first.
    """
    lengths = sorted({length for length in LENGTHS if length < longest} | {longest})
    cells = []
    for place, context in enumerate(contexts):
        # How cost grows with context shows on a few shapes; long prefills are dear on a CPU.
        some = lengths if place == 0 else sorted({0, lengths[len(lengths) // 2]})
        cells += [
            Cell(batch, length, context)
            for batch in (batches if place == 0 else batches[:2])
            for length in some
            if batch * (length + 1) <= max(most_rows, batch)
        ]
    return sorted(cells, key=lambda c: c.batch * (c.length + 1))


def measure(
    engine: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    longest: int,
    most_rows: int,
    contexts: Sequence[int],
    quiet: bool = False,
) -> Cost:
    """Run the grid and fit it.

    Args:
        engine: ``sglang.Engine`` arguments, target and drafter among them.
        prompts: token ids; repeated as needed to fill a context.
        batches, longest, most_rows, contexts: as of :func:`grid`.
        quiet: no progress bar.

    Raises:
        RunnerError: the engine failed.
        ProfileError: too few rounds came of it.
    """
    cells = grid(batches, longest, most_rows, contexts)
    logs = Path(tempfile.mkdtemp(prefix="libraspec-profile-"))
    trace = logs / "trace.jsonl"
    options = {"policy": "static", "static_length": longest, "trace": trace}
    with EngineProcess("profile", engine, options, logs / "engine.log") as process:
        with tqdm(total=1, desc="starting the engine", disable=quiet, file=sys.stderr) as bar:
            process.wait_ready()
            bar.update()
        largest = Cell(max(batches), 2, contexts[0])
        _run(process, largest, ROUNDS, prompts)  # memory touched, not counted
        pace = 0.0  # seconds of the last cell's rounds
        warm = _lines(trace)
        gained = {0: 1.0}  # tokens a round, by length
        for cell in tqdm(cells, desc="timing rounds", disable=quiet, file=sys.stderr):
            near = max(length for length in gained if length <= cell.length)
            expected = gained[near] if near == cell.length else gained[near] + 1.0
            about = max(FEWER_ROUNDS, min(ROUNDS, round(CELL_SECONDS / max(pace, 1e-3))))
            tokens = 1 + round(about * min(expected, cell.length + 1))
            pace, gained[cell.length] = _run(process, cell, tokens, prompts)
    with trace.open() as stream:
        header = json.loads(next(stream))
        rounds = [json.loads(line) for number, line in enumerate(stream, 2) if number > warm]
    return fit(header, rounds, batches)


def _run(
    process: EngineProcess, cell: Cell, tokens: int, prompts: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Answers of ``tokens`` tokens in a cell; returns (seconds a round, tokens a round brought).

    Every request has a prompt of its own (and finds it in the radix cache when another length had
    it before).
    """
    requests = []
    for i in range(cell.batch):
        turned = prompts[i % len(prompts)][i:]
        ids = (list(turned) * (cell.context // len(turned) + 1))[: cell.context]
        sampling = {
            "temperature": 0,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "custom_params": {"libraspec_max_length": cell.length},
        }
        requests.append({"input_ids": ids, "sampling_params": sampling})
    seconds, answers = process.ask(requests, concurrency=cell.batch)
    for answer in answers:
        if "error" in answer:
            raise ProfileError(f"batch {cell.batch}, context {cell.context}: {answer['error']}")
    batch = Batch.of(seconds, answers)
    decoded, rounds = sum(len(o) - 1 for o in batch.outputs), max(sum(batch.rounds), 1)
    return seconds * cell.batch / rounds, decoded / rounds


def _lines(path: Path) -> int:
    with path.open() as stream:
        return sum(1 for _ in stream)


def fit(header: dict[str, str], rounds: Iterable[dict[str, Any]], batches: Sequence[int]) -> Cost:
    """A cost file's content from a trace.

    Args:
        header: the trace's first line.
        rounds: its other lines.
        batches: sizes that count.

    Raises:
        ProfileError: no shape of round was seen often enough.
    """
    verify, draft, elsewhere = defaultdict(list), defaultdict(list), []
    for r in rounds:
        batch, seconds = len(r["requests"]), r["seconds"]
        if batch not in batches or len(set(r["verified"])) > 1:
            continue  # the last rounds of a cell, in which requests end
        # Rounds of about one context make a point; the mean is what they are fitted at.
        shape = (batch, sum(r["verified"]), round(sum(r["context"]) / (64 * batch)))
        context = sum(r["context"])
        verify[shape].append((context, sum(seconds[k] for k in ("verify", "accept", "commit"))))
        if width := len(r["confidence"][0]):
            drafted = (batch, batch * (width + 1), shape[2])
            draft[drafted].append((context, seconds["draft"]))
        if r["gap"] is not None:
            parts = sum(seconds[k] for k in ("window", "decide", "layout", "result"))
            elsewhere.append(r["gap"] + parts)
    points = {"verify": _points(verify), "draft": _points(draft)}
    for name, some in points.items():
        if len({p[1] for p in some}) < 2:
            raise ProfileError(f"too few rounds to fit the cost of a {name} pass: {len(some)}")
    forwards, residuals = {}, []
    for name, some in points.items():
        forwards[name], errors = fit_forward(some)
        residuals += errors.tolist()
    return Cost(
        version=1,
        device=header["device"],
        target=header["target"],
        drafter=header["drafter"],
        measured=True,
        how="timed by `libraspec profile` in a running engine",
        elsewhere=round(statistics.median(elsewhere), 7) if elsewhere else 0.0,
        verify=forwards["verify"],
        draft=forwards["draft"],
        profile=Profile(
            versions=_versions(),
            residual_median=round(statistics.median(residuals), 4),
            residual_worst=round(max(residuals), 4),
            **points,
        ),
    )


def _points(groups: dict[tuple, list[tuple[int, float]]]) -> list[Point]:
    return [
        (
            batch,
            rows,
            round(statistics.fmean(context for context, _ in seen)),
            round(statistics.median(seconds for _, seconds in seen), 7),
        )
        for (batch, rows, _), seen in sorted(groups.items())
        if len(seen) >= LEAST_ROUNDS
    ]


def fit_forward(points: Sequence[Point]) -> tuple[Forward, np.ndarray]:
    """A forward pass through measured points.

    Args:
        points: of at least two different rows.

    Returns:
        the pass, and its relative error at each point.
    """
    batch, rows, context, seconds = np.array(points, dtype=np.float64).T
    knots = np.unique(rows)
    # Column k: what the table rises by from knot k-1 to knot k; all rises are at least 0.
    rises = np.clip((rows[:, None] - knots[:-1]) / np.maximum(np.diff(knots), 1e-12), 0.0, 1.0)
    columns = [np.ones(len(rows)), *rises.T, batch, context, rows / batch * context]
    design = np.stack(columns, axis=1) / seconds[:, None]
    scale = np.maximum(design.max(axis=0), 1e-300)
    found, _ = nnls(design / scale, np.ones(len(rows)))
    found = found / scale
    table = np.maximum(found[: len(knots)].cumsum(), 1e-9)
    per_request, per_context, per_row_context = found[len(knots) :]
    forward = Forward(
        rows=knots.astype(int).tolist(),
        seconds=[round(float(s), 9) for s in table],
        per_request=round(float(per_request), 10),
        per_context_token=round(float(per_context), 13),
        per_row_context=round(float(per_row_context), 13),
    )
    predicted = np.array([forward(int(b), r, c) for b, r, c, _ in points])
    return forward, np.abs(predicted - seconds) / seconds


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def table(cost: Cost) -> str:
    """The measured points beside the fit, for a reader."""
    lines = [f"{cost.device}\ntarget: {cost.target}\ndrafter: {cost.drafter}"]
    for name, forward in (("target's forward", cost.verify), ("draft pass", cost.draft)):
        points = cost.profile.verify if forward is cost.verify else cost.profile.draft
        lines.append(f"\n{name}\n{'requests':>9}{'rows':>6}{'context':>9}{'ms':>9}{'fit':>9}")
        lines += [
            f"{b:>9}{r:>6}{c:>9}{1e3 * s:>9.2f}{1e3 * float(forward(b, r, c)):>9.2f}"
            for b, r, c, s in points
        ]
    lines.append(
        f"\nelsewhere {1e3 * cost.elsewhere:.2f} ms a round; the fit is off by "
        f"{cost.profile.residual_median:.1%} (median), {cost.profile.residual_worst:.1%} (worst)"
    )
    return "\n".join(lines)
