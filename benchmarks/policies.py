"""Every length policy and every static length on the same prompts, side by side in one run.

    python benchmarks/policies.py --pair test --concurrency 1,4,16 --temperature 0,1 --json

One engine per policy and one for plain decoding; engines take turns of a few prompts, in another
order each time, so a noisy machine hurts all alike. Cells are prompt set x concurrency x
temperature. Per cell and policy: tokens per second, eta (against plain decoding in the same cell),
tau (tokens per round), rows verified per round, wasted rows (verified and not accepted).

The last table compares `libra` with plain decoding, with the best static length *of each cell*
(which nobody knows beforehand), with the one static length that is best over all cells (an operator
could set it), and with the best other policy of each cell. A turn has twice as many requests as run
at once and a cell at least two turns; prompts repeat where there are fewer. Before each cell every
engine answers one turn of it that does not count (of further prompts of the set, where the file has
them): the traffic of a server does not change from one prompt to the next, so what a policy takes
to notice is not charged to the few prompts of a cell.
Answers differ in length by up to half, the same for every engine: if all were equally long, plain
decoding (alone) would fill and empty its whole batch at once, which no server sees. `libra` decides
by what `libraspec profile` measured, if it is given (`--cost`), else by what it learns as it goes.

Each engine takes 0.5 (test pair) to 2 GB (real pair) of memory; `--policies` runs fewer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from libraspec_sglang.demo import compare, pairs
from libraspec_sglang.demo.runner import Batch

POLICIES = ("static-1", "static-3", "static-7", "static-15", "gemma", "failfast", "libraspec",
            "libra")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pair", choices=pairs.NAMES, default="test")
    parser.add_argument("--policies", default=",".join(POLICIES),
                        help=f"static-N verifies N drafted tokens (default: {','.join(POLICIES)})")
    parser.add_argument("--concurrency", default="1,4,16", help="default: 1,4,16")
    parser.add_argument("--temperature", default="0,1", help="default: 0,1")
    parser.add_argument("--limit", type=int, default=8, help="prompts per set (default: 8)")
    parser.add_argument("--max-new-tokens", type=int, default=96,
                        help="tokens an answer has on average; half to one and a half times as "
                        "many (default: 96)")
    parser.add_argument("--repeat", type=int, default=1, help="times every cell is run")
    parser.add_argument("--cost", help="file of `libraspec profile`, for libra (default: none)")
    parser.add_argument("--prompts", type=Path, default=compare.PROMPTS,
                        help="JSONL with 'dataset' and 'turns' (default: the prompts that ship)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args()


def main() -> int:
    args = parse()
    pair = pairs.resolve(args.pair)
    levels = [int(c) for c in args.concurrency.split(",")]
    temperatures = [float(t) for t in args.temperature.split(",")]
    sets = {name: compare.tokenize(pair, texts, room=600)
            for name, texts in compare.prompts_by_dataset(args.prompts).items()}  # fmt: skip
    base = {
        "model_path": str(pair.target), "dtype": "float32", "skip_tokenizer_init": True,
        "max_running_requests": max(levels), "max_total_tokens": max(16000, 900 * max(levels)),
        "sleep_on_idle": True, "disable_overlap_schedule": True,
        "enable_deterministic_inference": True,  # seeds count, so sampled outputs compare too
    }  # fmt: skip
    ours = {**base, "speculative_algorithm": "LIBRASPEC",
            "speculative_draft_model_path": str(pair.drafter)}  # fmt: skip
    setups: list[tuple[str, dict, dict]] = [("plain", base, {})]
    for policy in args.policies.split(","):
        name, _, length = policy.partition("-")
        options = {"policy": name, **({"static_length": length} if length else {})}
        if name == "libra" and args.cost:
            options["cost"] = str(Path(args.cost).resolve())
        setups.append((policy, ours, options))
    logs = Path(tempfile.mkdtemp(prefix="libraspec-policies-"))
    cells: dict[tuple, compare.Tally] = {}
    with ExitStack() as stack:
        warm_up = next(iter(sets.values()))[:1]
        engines = compare.start(stack, setups, logs, warm_up, quiet=args.json)
        grid = list(itertools.product(sets, levels, temperatures, range(args.repeat)))
        order = random.Random(0)
        for name, level, temperature, _ in tqdm(grid, desc="cells", file=sys.stderr):
            turn, timed, spare = 2 * level, sets[name][: args.limit], sets[name][args.limit :]
            count = max(len(timed), 2 * turn)
            for engine in engines:
                engine.ask(requests(spare or timed, turn, args.max_new_tokens, temperature, seed=1),
                           concurrency=level, flush=True)  # fmt: skip
            asked = requests(timed, count, args.max_new_tokens, temperature, seed=0)
            for first in range(0, count, turn):
                for engine in order.sample(engines, len(engines)):
                    seconds, answers = engine.ask(
                        asked[first : first + turn], concurrency=level, flush=True
                    )
                    key = (name, level, temperature, engine.name)
                    tally = cells.setdefault(key, compare.Tally())
                    tally.add(Batch.of(seconds, answers), first)
    rows = summary(cells)
    if args.json:
        print(json.dumps({"pair": args.pair, "cells": rows}))
    else:
        show(rows)
    return 0 if all(r["identical"] for r in rows) else 1


def requests(prompts: list[list[int]], count: int, mean_tokens: int, temperature: float,
             seed: int) -> list[dict[str, Any]]:  # fmt: skip
    """The prompts in turn, each with a seed of its own and a length of half to one and a half times
    the mean."""
    lengths = random.Random(seed)
    return [
        {"input_ids": ids, "sampling_params": {
            "temperature": temperature, "sampling_seed": 100_000 * seed + i, "ignore_eos": True,
            "max_new_tokens": lengths.randint((mean_tokens + 1) // 2, mean_tokens * 3 // 2)}}
        for i, ids in zip(range(count), itertools.cycle(prompts), strict=False)
    ]  # fmt: skip


def summary(cells: dict[tuple, compare.Tally]) -> list[dict[str, Any]]:
    """A row per cell and policy. Seeds make sampled outputs comparable token for token too."""
    rows = []
    for (name, level, temperature, policy), cell in cells.items():
        plain = cells[name, level, temperature, "plain"]
        row, floor = cell.row(policy, level), plain.row("plain", level)
        rows.append({"set": name, "temperature": temperature, **row,
                     "eta": row["tokens_per_s"] / floor["tokens_per_s"],
                     "wasted": row["mean_verified"] - row["tau"],
                     "identical": cell.identical(plain)})  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    policies = list(dict.fromkeys(r["name"] for r in rows))
    statics = [p for p in policies if p.startswith("static-")]
    for level, temperature in dict.fromkeys((r["concurrency"], r["temperature"]) for r in rows):
        here = [r for r in rows if (r["concurrency"], r["temperature"]) == (level, temperature)]
        print(f"\nconcurrency {level}, temperature {temperature:g} (mean over the prompt sets)")
        print(f"{'':12}{'eta':>7}{'tau':>7}{'verified':>10}{'wasted':>8}   eta by set")
        for policy in policies:
            own = [r for r in here if r["name"] == policy]
            mean = {k: statistics.fmean(r[k] for r in own)
                    for k in ("eta", "tau", "mean_verified", "wasted")}  # fmt: skip
            by_set = "  ".join(f"{r['set']} {r['eta']:.2f}" for r in own)
            print(f"{policy:12}{mean['eta']:7.2f}{mean['tau']:7.2f}{mean['mean_verified']:10.2f}"
                  f"{mean['wasted']:8.2f}   {by_set}")  # fmt: skip
    if "libra" in policies and statics:
        compare_libra(rows, statics, [p for p in policies if p not in ("libra", "plain")])
    print("outputs:", "identical to plain decoding in all cells"
          if all(r["identical"] for r in rows) else "NOT identical in some cells")  # fmt: skip


def compare_libra(rows: list[dict[str, Any]], statics: list[str], others: list[str]) -> None:
    cells: dict[tuple, dict[str, float]] = {}
    for r in rows:
        cell = r["set"], r["concurrency"], r["temperature"]
        cells.setdefault(cell, {})[r["name"]] = r["eta"]
    overall = max(statics, key=lambda p: statistics.fmean(c[p] for c in cells.values()))
    print(f"\nlibra's tokens per second, of those of {'plain':>17}{'best static':>23}"
          f"{overall:>12}{'best other':>23}")  # fmt: skip
    ratios = []
    for (name, level, temperature), eta in cells.items():
        static, other = max(statics, key=eta.__getitem__), max(others, key=eta.__getitem__)
        ratios.append([eta["libra"] / eta[p] for p in ("plain", static, overall, other)])
        plain, best, fixed, policy = ratios[-1]
        print(f"  {name:12} concurrency {level:2d} temperature {temperature:g}: {plain:7.3f}"
              f"{best:11.3f} {static:11}{fixed:12.3f}{policy:11.3f} {other:11}")  # fmt: skip
    plain, best, fixed, policy = map(statistics.fmean, zip(*ratios, strict=True))
    print(f"  {'mean':46}{plain:7.3f}{best:11.3f} {'':11}{fixed:12.3f}{policy:11.3f}")


if __name__ == "__main__":
    sys.exit(main())
