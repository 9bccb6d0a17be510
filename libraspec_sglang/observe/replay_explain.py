"""Why a policy verified what it did in one round of a replay."""

from __future__ import annotations

from typing import Any

import numpy as np

from libraspec_sglang.controller.cost_file import Cost
from libraspec_sglang.controller.libra import Libra

from .replay import ORACLES, Played, Prices, ReplayError, Schedule, Setting, play
from .trace_reader import Rounds

SHOWN_BEYOND = 2
"""Positions after the last verified one that the text shows."""


def explain(
    rounds: Rounds, cost: Cost, spec: str, batch: int, setting: Setting, game: Played, number: int
) -> dict[str, Any]:
    """Round ``number`` (from 1) of a replay, as plain data.

    Survivals are what the policy went by for ``libra`` (its calibration and its own idea of cost
    at that moment), else the trace's fitted ones and the cost file. The rate is the round's
    expected tokens per second as decided; a token is worth its row while its marginal gain over
    its marginal cost is above it.

    Raises:
        ReplayError: there is no such round.
    """
    steps = len(game.lengths)
    if not 1 <= number <= steps:
        raise ReplayError(f"--explain {number}: at batch {batch} the rounds are 1 to {steps}")
    step, depth = number - 1, rounds.confidence.shape[1]
    schedule = Schedule.of(rounds, batch)
    prices = Prices.of(cost, batch, depth, schedule.context.mean())
    index, lengths, width = schedule.index[step], game.lengths[step], int(game.widths[step])
    confidence, context = rounds.confidence[index], int(schedule.context[step])
    total = batch + int(lengths.sum())
    around = np.array([max(total - 1, batch), total, total + 1]).clip(max=len(prices.verify) - 1)
    survival = rounds.chance[index].cumprod(axis=1)
    seconds = prices.seconds(around, np.full(3, width), np.full(3, context))
    if spec not in ORACLES:
        policy = setting.policy(spec, depth, cost)
        if isinstance(policy, Libra):
            play(policy, rounds, schedule, prices, steps=step)
            reach = min(depth, policy.max_length)  # deeper positions it never drafts
            survival = np.zeros(confidence.shape)
            survival[:, :reach] = policy.calibrations[0].survival(confidence[:, :reach])
            if policy.verify_cost.known:
                drafting = policy.draft_cost.seconds(batch)[batch * (width + 1)] if width else 0.0
                table = policy.verify_cost.seconds(batch)
                seconds = table[around.clip(max=len(table) - 1)]
                seconds = policy.elsewhere.seconds(batch) + drafting + seconds
    position = np.arange(depth)
    expected = batch + float((survival * (position < lengths[:, None])).sum())
    rate = expected / float(seconds[1])
    last, following = (float(s) for s in np.diff(seconds).clip(min=0.0))
    return {
        "policy": spec,
        "batch": batch,
        "round": number,
        "drafted": width,
        "rows": total,
        "seconds": float(seconds[1]),
        "expected_tokens_per_s": rate,
        "requests": [
            _request(
                confidence[slot], survival[slot], int(lengths[slot]),
                min(width, int(rounds.depth[index[slot]])), int(rounds.reached[index[slot]]),
                last, following, rate,
            )
            for slot in range(batch)
        ],
    }  # fmt: skip


def _request(
    confidence: np.ndarray,
    survival: np.ndarray,
    length: int,
    drafted: int,
    reached: int,
    last: float,
    following: float,
    rate: float,
) -> dict[str, Any]:
    """One request's positions; ``last`` and ``following`` are the seconds of the round's last row
    and of one more."""
    positions = []
    for place in range(drafted):
        cost = last if place < length else following
        gain = float(survival[place])
        positions.append(
            {
                "position": place + 1,
                "confidence": float(confidence[place]),
                "survival": gain,
                "gain": gain,
                "cost_s": cost,
                "ratio": gain / cost if cost > 0 else None,
                "verified": place < length,
            }
        )
    stop = positions[length] if length < drafted else None
    if stop is None:
        why = "everything drafted is verified" if drafted else "nothing was drafted"
    elif stop["ratio"] is not None and stop["ratio"] <= rate:
        why = f"token {length + 1} brings {stop['ratio']:.0f} tokens/s, the round {rate:.0f}"
    else:
        why = f"by the policy's own rule; token {length + 1} would have paid"
    return {
        "length": length,
        "accepted": min(length, reached),
        "would_be_accepted": reached,
        "stopped": why,
        "positions": positions,
    }


def text(explained: dict[str, Any]) -> str:
    """For a reader; marginal gain is the survival itself, in tokens."""
    lines = [
        f"round {explained['round']}, policy {explained['policy']}, batch {explained['batch']}: "
        f"{explained['drafted']} drafted each, {explained['rows']} rows verified, "
        f"{1e3 * explained['seconds']:.3f} ms, {explained['expected_tokens_per_s']:.0f} expected "
        "tokens/s"
    ]
    for number, request in enumerate(explained["requests"], 1):
        lines.append(
            f"  request {number}: length {request['length']}, accepted {request['accepted']} (all "
            f"drafted: {request['would_be_accepted']}). Stopped: {request['stopped']}."
        )
        shown = request["positions"][: request["length"] + SHOWN_BEYOND]
        if shown:
            lines.append("    token  confidence  survival = gain  cost us/row  gain/cost tokens/s")
        for row in shown:
            ratio = "inf" if row["ratio"] is None else f"{row['ratio']:.0f}"
            mark = "verified" if row["verified"] else "left"
            lines.append(
                f"    {row['position']:>5}  {row['confidence']:>10.4f}  {row['survival']:>15.4f}  "
                f"{1e6 * row['cost_s']:>11.2f}  {ratio:>18}  {mark}"
            )
    return "\n".join(lines)
