"""Which way past the first block is better: one wider pass, or a further block?

    python benchmarks/extension.py --pair test --json

Policy `libraspec` (the paper's rule) with `--libraspec-extension wide` and `block`, at the given
alphas, on the prompts that ship; engines take turns in one run. A further block is conditioned on
the drafted tokens, which should make it better, and costs a second pass, which a wide one does not.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path

from libraspec_sglang.demo import compare, pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pair", choices=("real", "test"), default="test")
    parser.add_argument("--alpha", default="2.2,8", help="alphas to run (default: 2.2,8)")
    parser.add_argument("--concurrency", default="1,4", help="default: 1,4")
    parser.add_argument("--limit", type=int, default=16, help="prompts (default: 16)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="default: 96")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    pair = pairs.resolve(args.pair)
    ids = compare.tokenize(pair, compare.read_prompts(compare.PROMPTS, args.limit), room=800)
    levels = [int(c) for c in args.concurrency.split(",")]
    engine_args = {
        "model_path": str(pair.target), "speculative_draft_model_path": str(pair.drafter),
        "speculative_algorithm": "LIBRASPEC", "dtype": "float32", "skip_tokenizer_init": True,
        "max_running_requests": max(levels), "max_total_tokens": 16000, "sleep_on_idle": True,
        "disable_overlap_schedule": True,
    }  # fmt: skip
    logs = Path(tempfile.mkdtemp(prefix="libraspec-extension-"))
    setups = [
        (f"{extension}-{alpha}", engine_args,
         {"policy": "libraspec", "alpha": alpha, "extension": extension})
        for alpha in args.alpha.split(",") for extension in ("wide", "block")
    ]  # fmt: skip
    with ExitStack() as stack:
        engines = compare.start(stack, setups, logs, ids[:1], quiet=args.json)
        tallies = compare.take_turns(pair, engines, ids, levels, args.max_new_tokens, 1, args.json)
    rows = [tallies[(e.name, c)].row(e.name, c) for c in levels for e in engines]
    if args.json:
        print(json.dumps({"pair": args.pair, "runs": rows}))
        return
    print(f"{'':12}{'concurrency':>12}{'tokens/s':>10}{'tau':>7}{'verified':>10}{'rounds':>8}")
    for r in rows:
        print(
            f"{r['name']:12}{r['concurrency']:12d}{r['tokens_per_s']:10.1f}{r['tau']:7.2f}"
            f"{r['mean_verified']:10.2f}{r['rounds']:8d}"
        )


if __name__ == "__main__":
    main()
