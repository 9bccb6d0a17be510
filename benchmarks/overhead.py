"""Where a round's time goes, and what LIBRASPEC adds to it.

    python benchmarks/overhead.py --pair both --json

Two questions, each answered by one run on this machine:

1. In LIBRASPEC at its defaults, which share of a round is neither the drafter's pass nor the
   target's forward? Parts are timed in the worker (a trace); the floor of a round is one target
   forward over the same rows, and is printed beside it.
2. Is LIBRASPEC with a static length as fast as built-in DFLASH? Both verify the same rows, engines
   take turns on every slice of the prompts, and the ratio of their seconds per round is reported:
   the median over the slices, since other processes disturb some of them.

Exit status 1 when a limit is missed: share <= 10 % at batch 1 and 16, ratio <= 1.05.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from libraspec_sglang.demo import compare, pairs
from libraspec_sglang.demo.runner import EngineProcess
from libraspec_sglang.drafters import checkpoint

FORWARDS = ("draft", "verify", "commit")  # model code: drafter pass, target forward, drafter's KV
ADDED = ("window", "decide", "layout", "accept", "result")
SHARE_LIMIT, RATIO_LIMIT = 0.10, 1.05
TOKENS = {"test": 128, "real": 32}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pair", choices=("real", "test", "both"), default="both")
    parser.add_argument("--batches", default="1,16", help="batch sizes (default: 1,16)")
    parser.add_argument("--prompts-per-batch", type=int, default=16, help="default: 16")
    parser.add_argument("--max-new-tokens", type=int,
                        help="default: 128 for the test pair, 32 for the real one, which is slower "
                        "(answers must be long enough for rounds of whole batches)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    names = ("test", "real") if args.pair == "both" else (args.pair,)
    batches = [int(b) for b in args.batches.split(",")]
    results = [measure(name, batches, args.max_new_tokens or TOKENS[name], args) for name in names]
    missed = [m for r in results for m in r["missed"]]
    if args.json:
        print(json.dumps({"limits": {"share": SHARE_LIMIT, "ratio": RATIO_LIMIT},
                          "pairs": results, "missed": missed}))  # fmt: skip
    else:
        for result in results:
            show(result)
        print("\nlimits missed:", "; ".join(missed) if missed else "none")
    return 1 if missed else 0


def measure(name: str, batches: list[int], tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    pair = pairs.resolve(name)
    texts = compare.read_prompts(compare.PROMPTS, args.prompts_per_batch)
    ids = compare.tokenize(pair, texts, room=600)
    block = checkpoint.read(str(pair.drafter)).block_size
    base = {
        "model_path": str(pair.target), "dtype": "float32", "skip_tokenizer_init": True,
        "max_running_requests": max(batches), "max_total_tokens": 20000, "sleep_on_idle": True,
        "disable_overlap_schedule": True, "speculative_draft_model_path": str(pair.drafter),
    }  # fmt: skip
    logs = Path(tempfile.mkdtemp(prefix="libraspec-overhead-"))
    trace = logs / "trace.jsonl"
    ours = {**base, "speculative_algorithm": "LIBRASPEC"}
    dflash = {
        **base,
        "speculative_algorithm": "DFLASH",
        "speculative_num_draft_tokens": block,
    }
    setups = [
        ("default", ours, {"trace": trace}),
        ("static", ours, {"policy": "static", "static_length": block - 1}),
        ("dflash", dflash, {}),
    ]
    result: dict[str, Any] = {"pair": name, "block": block, "batches": [], "missed": []}
    with ExitStack() as stack:
        engines = {}
        for label, arguments, options in tqdm(setups, desc=f"{name}: engines", disable=args.json):
            process = EngineProcess(label, arguments, options, logs / f"{label}.log")
            engines[label] = stack.enter_context(process)
            process.wait_ready()
            process.generate(ids[:1], max_new_tokens=8, concurrency=1)
        for batch in tqdm(batches, desc=f"{name}: batches", disable=args.json):
            default = _turns(engines["default"], ids, batch, tokens, pair)
            both = _paired(engines["static"], engines["dflash"], ids, batch, tokens, pair)
            result["batches"].append({"batch": batch, **both, "default": default})
    rounds = read_trace(trace)
    for row in result["batches"]:
        row.update(parts(rounds, row["batch"]))
        if row["added_share"] > SHARE_LIMIT:
            result["missed"].append(f"{name}, batch {row['batch']}: added share over 10 %")
        if row["static_over_dflash"] > RATIO_LIMIT:
            result["missed"].append(f"{name}, batch {row['batch']}: static over DFLASH 1.05")
    return result


def _turns(process: EngineProcess, ids, batch: int, tokens: int, pair) -> dict[str, float]:
    answered = process.generate(
        ids, max_new_tokens=tokens, concurrency=batch, flush=True, ignore_eos=not pair.chat
    )
    count = sum(len(o) for o in answered.outputs)
    return {"tokens_per_s": count / answered.seconds}


def _paired(
    static: EngineProcess, dflash: EngineProcess, ids, batch: int, tokens: int, pair
) -> dict[str, Any]:
    """Seconds per round of both on the same slices, in alternating order."""
    ratios = []
    size = max(batch, 4)
    for repeat in range(3):
        for start in range(0, len(ids) - size + 1, size):
            order = [static, dflash] if (repeat + start // size) % 2 else [dflash, static]
            seconds = {}
            for process in order:
                answered = process.generate(
                    ids[start : start + size],
                    max_new_tokens=tokens,
                    concurrency=batch,
                    flush=True,
                    ignore_eos=not pair.chat,
                )
                seconds[process.name] = answered.seconds / sum(answered.rounds)
            ratios.append(seconds["static"] / seconds["dflash"])
    return {"static_over_dflash": statistics.median(ratios), "ratios": sorted(ratios)}


def read_trace(path: Path) -> list[dict[str, Any]]:
    with path.open() as stream:
        return [json.loads(line) for line in stream][1:]


def parts(rounds: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Median milliseconds per part over the rounds of one batch size."""
    # The engine's first rounds touch memory for the first time; they are not the steady state.
    own = [r for r in rounds if len(r["requests"]) == batch][8:]
    if not own:
        raise SystemExit(f"no rounds at batch {batch}: raise --prompts-per-batch")
    names = (*FORWARDS, *ADDED)
    median = {n: 1e3 * statistics.median(r["seconds"].get(n, 0.0) for r in own) for n in names}
    shares = [
        sum(r["seconds"].get(n, 0.0) for n in ADDED) / sum(r["seconds"].values()) for r in own
    ]
    return {
        "rounds": len(own),
        "parts_ms": median,
        "round_ms": 1e3 * statistics.median(sum(r["seconds"].values()) for r in own),
        "floor_ms": median["verify"],
        "added_share": statistics.median(shares),
        "verified": statistics.fmean(sum(r["verified"]) / batch for r in own),
        "gained": statistics.fmean(sum(r["gained"]) / batch for r in own),
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['pair']} pair, block {result['block']}")
    for row in result["batches"]:
        print(
            f"  batch {row['batch']}: round {row['round_ms']:.2f} ms over {row['rounds']} rounds, "
            f"floor (one target forward of its {row['verified']:.1f} rows a request) "
            f"{row['floor_ms']:.2f} ms"
        )
        for name, value in row["parts_ms"].items():
            kind = "added  " if name in ADDED else "forward"
            print(f"    {kind} {name:8} {value:8.3f} ms")
        print(f"    added share {row['added_share']:.1%} (limit {SHARE_LIMIT:.0%})")
        print(
            f"    LIBRASPEC static / DFLASH, seconds per round: {row['static_over_dflash']:.3f} "
            f"(limit {RATIO_LIMIT})"
        )


if __name__ == "__main__":
    sys.exit(main())
