"""The commands of `train_bytes_target.py`: corpus, training loop, report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from . import corpus
from .byte_tokenizer import EOS, PAD, VOCAB, save_tokenizer
from .files import load_checkpoint, save_checkpoint
from .optim import Optimizer, Progress, lr_scale
from .target import CausalLM, TargetConfig

CONFIG = TargetConfig(
    vocab_size=VOCAB, hidden_size=256, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=64,
    mlp_size=640, rms_norm_eps=1e-6, rope_theta=10000.0, qk_norm=True, tied=True,
    max_positions=4096, eos_token_ids=(EOS,),
)
# Share of the run at which each sequence length begins: short ones first, they are cheaper.
LENGTHS = ((0.0, 256), (0.35, 512), (0.75, 1024))


def build_corpus(args: argparse.Namespace) -> None:
    streams = corpus.build(args.chat, args.exclude_prompts)
    corpus.save(streams, args.work)
    for (kind, part), tokens in sorted(streams.items()):
        print(f"{kind:7} {part:9} {len(tokens) / 1e6:7.2f} MB")


def sequence_length(progress: float) -> int:
    return max(length for start, length in LENGTHS if progress >= start)


def bits_per_byte(model: CausalLM, data: corpus.Corpus, windows: int, length: int = 512) -> float:
    rng = np.random.default_rng(7)
    total = 0.0
    with torch.no_grad():
        for _ in range(windows // 8):
            total += loss_of(model, torch.from_numpy(data.batch(rng, 8, length + 1))).item()
    return total / (windows // 8) / float(np.log(2))


def loss_of(model: CausalLM, ids: Tensor) -> Tensor:
    """Mean next-byte cross-entropy in nats of windows `[B, T + 1]`."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    mix = dict(zip(corpus.KINDS, args.mix, strict=True))
    data = corpus.Corpus(args.work, "train", mix)
    held_out = corpus.Corpus(args.work, "held_out", mix)
    model = CausalLM(CONFIG)
    model.init_weights()
    optimizer = Optimizer(model, lr=args.lr, adam_lr=args.adam_lr, weight_decay=0.05)
    first, spent, seen = 0, 0.0, 0
    state = load_checkpoint(args.work / "target.pt")
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, spent, seen = state["step"], state["spent"], state["seen"]
    progress = Progress(args.steps, args.minutes, spent)

    def checkpoint(step: int) -> None:
        save_checkpoint(args.work / "target.pt", {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "step": step, "spent": progress.spent, "seen": seen,
        })

    average = None
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, desc="target",
               mininterval=5, maxinterval=60)
    for step in bar:
        done = progress.at(step)
        if done >= 1.0:
            break
        length = sequence_length(done)
        rng = np.random.default_rng((args.seed, step))  # a resumed run sees the same batches
        ids = torch.from_numpy(data.batch(rng, args.tokens // length, length + 1))
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step(lr_scale(done, step))
        seen += ids.shape[0] * length
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        bar.set_postfix(bpb=f"{average / np.log(2):.3f}", mb=f"{seen / 1e6:.2f}",
                        done=f"{done:.2f}", refresh=False)
        if (step + 1) % 200 == 0:
            bpb = bits_per_byte(model, held_out, 48)
            tqdm.write(f"step {step + 1} seen {seen / 1e6:.2f} MB length {length} "
                       f"train {average / np.log(2):.3f} held-out {bpb:.3f} bits per byte")
            checkpoint(step + 1)
    else:
        checkpoint(args.steps)
    export(model, args.out)
    print(f"wrote {args.out}; {seen / 1e6:.2f} MB of text seen, {progress.spent / 60:.1f} minutes")


def export(model: CausalLM, out: Path) -> None:
    """Write the bf16 checkpoint, `config.json` and the tokenizer for transformers and SGLang."""
    out.mkdir(parents=True, exist_ok=True)
    model.save(out)
    cfg = model.cfg
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "vocab_size": cfg.vocab_size, "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers, "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads, "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp_size, "rms_norm_eps": cfg.rms_norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_theta": cfg.rope_theta, "rope_type": "default"},
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": cfg.tied, "max_position_embeddings": cfg.max_positions,
        "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD, "dtype": "bfloat16",
        "use_cache": True, "use_sliding_window": False,
        "layer_types": ["full_attention"] * cfg.num_layers, "initializer_range": 0.02,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    save_tokenizer(out)


def prefixes(args: argparse.Namespace) -> None:
    """Write `{kind}.jsonl` rows `{"text": ..}`: random windows that start at a line."""
    rng = np.random.default_rng(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in corpus.KINDS:
        try:
            data = corpus.Corpus(args.work, args.part, {kind: 1.0})
        except FileNotFoundError:
            continue
        rows = []
        while len(rows) < args.count:
            window = data.batch(rng, 1, 512 + args.bytes[1])[0].tolist()
            newline = window.index(10) + 1 if 10 in window[:512] else 0
            size = int(rng.integers(args.bytes[0], args.bytes[1] + 1))
            ids = window[newline : newline + size]
            text = bytes(ids).decode(errors="ignore") if max(ids) < 256 else ""
            if text.strip():
                rows.append(json.dumps({"text": text}))
        (args.out / f"{kind}.jsonl").write_text("\n".join(rows) + "\n")


def is_periodic(tokens: list[int], tail: int = 48) -> bool:
    """Whether the last `tail` tokens repeat with some period up to a third of them."""
    end = tokens[-tail:]
    return len(end) == tail and any(
        all(end[i] == end[i - period] for i in range(period, tail))
        for period in range(1, tail // 3 + 1)
    )


def report(args: argparse.Namespace) -> None:
    """Bits per byte by kind, and the share of greedy continuations (192 bytes) that loop."""
    from .decode import generate_all  # only this command generates

    model = CausalLM.from_pretrained(args.target)
    rng = np.random.default_rng(3)
    for kind in corpus.KINDS:
        try:
            data = corpus.Corpus(args.work, "held_out", {kind: 1.0})
        except FileNotFoundError:
            continue
        bpb = bits_per_byte(model, data, 160)
        prompts = [row.tolist() for row in data.batch(rng, args.prefixes, 256)]
        texts = generate_all(model, prompts, max_new=192)
        loops = np.mean([is_periodic(text) for text in texts])
        print(f"{kind:7} {bpb:.3f} bits per byte, {loops:.0%} of greedy texts end in a loop")
