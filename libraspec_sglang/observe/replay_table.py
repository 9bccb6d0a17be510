"""``libraspec replay``: a trace, a cost file and policies in, a table or JSON out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from libraspec_sglang.controller import cost_file

from . import replay, replay_explain, trace_reader


def run(
    trace: Path,
    cost: Path,
    policies: Sequence[str],
    batches: Sequence[int],
    setting: replay.Setting,
    *,
    explain: int | None = None,
) -> dict[str, Any]:
    """Everything that is printed, as plain data.

    Args:
        trace: file written by ``--libraspec-trace``.
        cost: cost file.
        policies: as :meth:`replay.Setting.policy` reads them, and the oracles.
        batches: batch sizes.
        setting: how policies are built.
        explain: also explain this round (from 1) of every policy, at the first batch size.

    Raises:
        TraceError, CostError, ReplayError: one line for the user.
    """
    prices = cost_file.read(cost)
    for spec in policies:
        if spec not in replay.ORACLES:
            setting.policy(spec, 1, prices)  # a wrong name should not wait for the trace
    rounds = trace_reader.read(trace)
    if setting.block_size is None:
        setting = replace(setting, block_size=rounds.block_size)
    results, explained, notes = [], [], list(rounds.notes)
    began, played = time.perf_counter(), 0
    for batch in batches:
        rows, games = replay.evaluate(rounds, prices, policies, batch, setting)
        results += [asdict(row) for row in rows]
        played += sum(game.lengths.size for game in games)
        if (times := games[0].lengths.size / len(rounds)) >= 2:
            notes.append(f"batch {batch}: a short trace; each round is played {times:.0f} times")
        if explain is not None and batch == batches[0]:
            explained = [
                replay_explain.explain(rounds, prices, spec, batch, setting, game, explain)
                for spec, game in zip(policies, games, strict=True)
            ]
    return {
        "trace": str(trace),
        "rounds": len(rounds),
        "requests": int(rounds.request[-1]) + 1,
        "depth": int(rounds.depth.max()),
        "positions": int(rounds.depth.sum()),
        "imputed": rounds.imputed,
        "notes": notes,
        "cost": {
            "file": str(cost),
            **prices.model_dump(include={"device", "target", "drafter", "measured"}),
        },
        "results": results,
        "rounds_per_s": played / (time.perf_counter() - began),
        "explained": explained,
    }


COLUMNS = (
    # heading, field, format
    ("batch", "batch", "d"),
    ("policy", "policy", "s"),
    ("tokens/s", "tokens_per_s", ".1f"),
    ("eta", "eta", ".2f"),
    ("tau", "tau", ".2f"),
    ("length", "mean_length", ".2f"),
    ("wasted", "wasted", ".2f"),
    ("deviation", "deviation", ".2f"),
)


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    cost = report["cost"]
    measured = "measured" if cost["measured"] else "derived, not measured"
    lines = [
        f"trace {report['trace']}: {report['rounds']} rounds of {report['requests']} requests, "
        f"at most {report['depth']} tokens drafted (no length can be longer)",
        f"cost {cost['file']}: {cost['device']}, {cost['target']}, {cost['drafter']} ({measured})",
        f"imputed: acceptance of {report['imputed']} of {report['positions']} drafted positions "
        "was not observed and drawn (fixed seed)",
        *(f"note: {note}" for note in report["notes"]),
        "",
    ]
    cells = [[heading for heading, *_ in COLUMNS]]
    cells += [[format(row[name], form) for _, name, form in COLUMNS] for row in report["results"]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines += [
        "  ".join(
            cell.ljust(width) if heading == "policy" else cell.rjust(width)
            for cell, width, (heading, *_) in zip(row, widths, COLUMNS, strict=True)
        )
        for row in cells
    ]
    lines += [
        f"batch {row['batch']}, {row['policy']}: calibration error of the confidences "
        f"{row['calibration'][0]:.3f}, as used {row['calibration'][1]:.3f}"
        for row in report["results"]
        if row["calibration"]
    ]
    for explained in report["explained"]:
        lines += ["", replay_explain.text(explained)]
    return "\n".join(lines)
