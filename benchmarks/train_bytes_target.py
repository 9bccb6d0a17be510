#!/usr/bin/env python3
"""Train the byte-level target of the test pair from scratch, on one CPU thread.

A 3.5 M parameter Qwen3-style model whose token id is the byte value. Two steps:

  1. collect text from the Python installation (and, optionally, questions and answers):
       python benchmarks/train_bytes_target.py corpus --work work/bytes

  2. train (about an hour), then write a Hugging Face directory:
       python benchmarks/train_bytes_target.py train --work work/bytes --out work/bytes-target

Training can be stopped and repeated with the same command: it resumes from its last
checkpoint. `--minutes` shortens the schedule to a time slot. `report` prints bits per byte on
held-out text and how often greedy text ends in a loop. Afterwards train a drafter for it with
`train_dflash.py`; a drafter only fits the exact target it was trained on.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from training import bytes_target


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    corpus = commands.add_parser("corpus", help="collect and filter the text")
    corpus.add_argument("--work", type=Path, required=True, help="directory for the corpus")
    corpus.add_argument("--chat", type=Path, nargs="*", default=[],
                        help='JSONL of questions {"turns": [..]} or answers {"prompt", "text"}')
    corpus.add_argument("--exclude-prompts", type=Path, nargs="*", default=[],
                        help="JSONL of evaluation prompts whose text must not be trained on")

    train = commands.add_parser("train", help="train and export")
    train.add_argument("--work", type=Path, required=True)
    train.add_argument("--out", type=Path, required=True, help="Hugging Face directory to write")
    train.add_argument("--steps", type=int, default=2400)
    train.add_argument("--minutes", type=float, help="end by then, whatever --steps says")
    train.add_argument("--tokens", type=int, default=4096, help="bytes per step")
    train.add_argument("--lr", type=float, default=1e-2, help="Muon, for matrices")
    train.add_argument("--adam-lr", type=float, default=3e-3, help="embedding and norms")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--mix", type=float, nargs=3, default=[0.6, 0.15, 0.25],
                       metavar=("PYTHON", "PROSE", "CHAT"), help="share of each kind of text")

    prefixes = commands.add_parser("prefixes", help="JSONL of text prefixes, as drafter prompts")
    prefixes.add_argument("--work", type=Path, required=True)
    prefixes.add_argument("--out", type=Path, required=True, help="one file per kind of text")
    prefixes.add_argument("--part", choices=["train", "held_out"], default="train")
    prefixes.add_argument("--count", type=int, default=1000, help="per kind")
    prefixes.add_argument("--bytes", type=int, nargs=2, default=[32, 128], metavar=("MIN", "MAX"))
    prefixes.add_argument("--seed", type=int, default=1)

    report = commands.add_parser("report", help="bits per byte and loops in greedy text")
    report.add_argument("--work", type=Path, required=True)
    report.add_argument("--target", type=Path, required=True)
    report.add_argument("--prefixes", type=int, default=60)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    {"corpus": bytes_target.build_corpus, "train": bytes_target.train,
     "prefixes": bytes_target.prefixes, "report": bytes_target.report}[args.command](args)


if __name__ == "__main__":
    main()
