"""Command line of `train_dflash.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import export, generate, train


def parser(description: str | None = None) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)

    gen = commands.add_parser("generate", help="the target's own answers as training data")
    gen.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
    gen.add_argument("--prompts", type=Path, nargs="+", required=True,
                     help="JSONL files; several are interleaved, each is one kind")
    gen.add_argument("--out", type=Path, required=True, help="folder of shards")
    gen.add_argument("--layers", type=int, nargs="+", required=True,
                     help="target layers whose outputs the drafter sees; the last layer cannot "
                          "be captured (ids up to layers - 2)")
    gen.add_argument("--max-new", type=int, default=256, help="tokens per answer")
    gen.add_argument("--max-prompt", type=int, default=256, help="longer prompts are skipped")
    gen.add_argument("--slots", type=int, default=64, help="sequences generated at once")
    gen.add_argument("--int8", action="store_true",
                     help="int8 products: about 3 times faster; a few per cent of tokens differ")
    gen.add_argument("--sampled", type=float, default=0.0, help="share of answers not greedy")
    gen.add_argument("--temperature", type=float, default=0.7, help="of the sampled share")
    gen.add_argument("--limit", type=int, help="prompts per file")
    gen.add_argument("--raw", action="store_true", help="do not apply the chat template")
    gen.add_argument("--minutes", type=float, help="stop after this long")
    gen.add_argument("--shard", type=int, default=32, help="answers per shard")
    gen.add_argument("--seed", type=int, default=0)
    gen.set_defaults(run=generate.run)

    fit = commands.add_parser("train", help="fit a drafter to the answers")
    fit.add_argument("--target", type=Path, required=True)
    fit.add_argument("--data", type=Path, nargs="+", required=True, help="folders of shards")
    fit.add_argument("--out", type=Path, required=True, help="checkpoint and curve.json")
    fit.add_argument("--eval", type=Path, nargs="+",
                     help="shards to measure on (default: every --held-out-every-th answer)")
    fit.add_argument("--init", type=Path, help="continue from a DFlash directory")
    fit.add_argument("--layers", type=int, nargs="+", help="as given to generate")
    fit.add_argument("--draft-layers", type=int, default=2)
    fit.add_argument("--mlp", type=int, help="MLP width (default: the target's)")
    fit.add_argument("--mask-token-id", type=int, help="a token that text never contains")
    fit.add_argument("--block-size", type=int, default=16, help="stated in the exported config")
    fit.add_argument("--train-block", type=int, nargs="+", default=[16],
                     help="positions trained, one of these at random per step; longer than "
                          "--block-size for a server that drafts wide and cuts by confidence")
    fit.add_argument("--decay", type=float, default=4.0, help="weight of position k: exp(-(k-1)/D)")
    fit.add_argument("--hot", type=int, default=0, help="draft from this many tokens; 0: all")
    fit.add_argument("--hot-prompts", type=Path, nargs="*",
                     help="JSONL prompts whose tokens also count when choosing them")
    fit.add_argument("--hard", type=float, default=0.5,
                     help="share of the loss on the token itself, the rest on the target's "
                          "probabilities")
    fit.add_argument("--steps", type=int, default=2000)
    fit.add_argument("--minutes", type=float, help="end by then, whatever --steps says")
    fit.add_argument("--max-epochs", type=float, help="stop at this many blocks per answer token")
    fit.add_argument("--batch", type=int, default=8, help="answers per step")
    fit.add_argument("--anchors", type=int, default=64, help="blocks per answer and step")
    fit.add_argument("--lr", type=float, default=4e-3, help="Muon, for matrices")
    fit.add_argument("--adam-lr", type=float, default=1e-3, help="norms")
    fit.add_argument("--weight-decay", type=float, default=0.05)
    fit.add_argument("--noise", type=float, default=0.0, help="feature noise, in channel RMS")
    fit.add_argument("--decay-from", type=float, default=0.4,
                     help="share of the run after which the rate falls")
    fit.add_argument("--held-out-every", type=int, default=33)
    fit.add_argument("--eval-every", type=int, default=250)
    fit.add_argument("--eval-block", type=int, default=16)
    fit.add_argument("--eval-limit", type=int, default=24, help="answers to measure on")
    fit.add_argument("--seed", type=int, default=0)
    fit.set_defaults(run=train.run)

    out = commands.add_parser("export", help="write a directory for SGLang")
    out.add_argument("--run", type=Path, required=True, dest="run_dir")
    out.add_argument("--out", type=Path, required=True)
    out.add_argument("--block-size", type=int, help="override the configured block size")
    out.set_defaults(run=export.export)

    ev = commands.add_parser("eval", help="tau, acceptance and calibration of a checkpoint")
    ev.add_argument("--target", type=Path, required=True)
    ev.add_argument("--drafter", type=Path, required=True)
    ev.add_argument("--data", type=Path, required=True, help="greedy answers to held-out prompts")
    ev.add_argument("--block-sizes", type=int, nargs="+")
    ev.add_argument("--full-head", action="store_true", help="ignore hot_token_ids.json")
    ev.add_argument("--json", type=Path, help="write all figures here")
    ev.set_defaults(run=export.run_eval)
    return top


def main(argv: list[str] | None = None, description: str | None = None) -> None:
    args = parser(description).parse_args(argv)
    args.run(args)
