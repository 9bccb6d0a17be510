"""`train_dflash.py export` and `eval`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from .drafter import Drafter, DrafterConfig
from .evaluate import Head, evaluate
from .files import load_checkpoint, write_json
from .hot import coverage
from .store import Store
from .target import CausalLM

HOT_FILE = "hot_token_ids.json"


def export(args: argparse.Namespace) -> None:
    """Write a trained run as a directory that SGLang loads."""
    state = load_checkpoint(args.run_dir / "drafter.pt")
    if state is None:
        raise SystemExit(f"no checkpoint in {args.run_dir}")
    cfg = DrafterConfig.from_state(state["config"])
    if args.block_size:
        cfg = replace(cfg, block_size=args.block_size)
    drafter = Drafter(cfg)
    drafter.load_state_dict(state["model"])
    drafter.feature_rms.copy_(state["feature_rms"])
    drafter.save(args.out)
    if state["hot"] is not None:
        (args.out / HOT_FILE).write_text(json.dumps(state["hot"].tolist()) + "\n")
    size = (args.out / "model.safetensors").stat().st_size
    print(f"wrote {args.out}: {size / 1e6:.1f} MB, block size {cfg.block_size}")


def load_hot(path: Path) -> torch.Tensor | None:
    """The checkpoint's hot tokens, if it has a list."""
    file = Path(path) / HOT_FILE
    return torch.tensor(json.loads(file.read_text())) if file.exists() else None


def run_eval(args: argparse.Namespace) -> None:
    """Print (and save) tau, acceptance and calibration at each block size."""
    target = CausalLM.from_pretrained(args.target)
    drafter = Drafter.load(args.drafter)
    hot = None if args.full_head else load_hot(args.drafter)
    head = Head(target.model.embed_tokens.weight, target.lm_head.weight, hot)
    store = Store([args.data])
    rows = [i for i in range(len(store)) if store.rows[i][6] == 0.0]
    results = []
    for block_size in args.block_sizes or [drafter.cfg.block_size]:
        result = evaluate(drafter, head, (store[i] for i in rows), block_size)
        results.append(result)
        total = result["all"]
        print(f"block {block_size}: mean tau {result['mean_tau']}, tau {total['tau']} over "
              f"{total['rounds']} rounds, ECE {total['ece']}")
        for kind, part in result["kinds"].items():
            print(f"  kind {kind}: tau {part['tau']} ({part['rounds']} rounds), ECE {part['ece']}")
        print(f"  accept given prefix: {total['accept_by_position']}")
    if hot is not None:
        print(f"hot tokens: {len(hot)}, cover {coverage(store, hot, target.cfg.vocab_size):.4f}")
    if args.json:
        write_json(args.json, results)
