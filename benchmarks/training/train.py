"""`train_dflash.py train`: fit a drafter to recorded answers.

Each step takes a few answers, draws anchors among their tokens and fills in one block per
anchor. The loss is the cross-entropy of the drafted distribution (over the hot tokens, which
is what the server computes) against a mix of the token that followed and the target's own
probabilities. Early positions count more: a block is only as good as its prefix.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .drafter import Drafter, DrafterConfig, new_drafter
from .evaluate import Head, evaluate
from .files import load_checkpoint, save_checkpoint, write_json
from .hot import choose_hot, text_counts
from .optim import Optimizer, Progress, lr_scale
from .store import Sequence, Store
from .target import CausalLM


@dataclass(frozen=True)
class Batch:
    """Padded answers and their blocks.

    features `[B, T, F]`, anchors `[B, A]`, anchor_ids `[B, A]`; labels `[B, A, n - 1]` (-1: no
    token there); soft_ids, soft_probs `[B, A, n - 1, K]`; sharpness `[B]`: the exponent for
    soft_probs.
    """

    features: Tensor
    anchors: Tensor
    anchor_ids: Tensor
    labels: Tensor
    soft_ids: Tensor
    soft_probs: Tensor
    sharpness: Tensor


def make_batch(sequences: list[Sequence], rng: np.random.Generator, anchors: int,
               block_size: int) -> Batch:
    """Draw `anchors` blocks from each answer; short answers repeat some."""
    longest = max(len(seq.ids) for seq in sequences)
    batch, width = len(sequences), sequences[0].features.shape[1]
    top = sequences[0].top_ids.shape[1]
    features = torch.zeros(batch, longest - 1, width)
    where = torch.zeros(batch, anchors, dtype=torch.long)
    anchor_ids = torch.zeros_like(where)
    labels = torch.full((batch, anchors, block_size - 1), -1)
    soft_ids = torch.zeros(batch, anchors, block_size - 1, top, dtype=torch.long)
    soft_probs = torch.zeros(batch, anchors, block_size - 1, top)
    offsets = torch.arange(1, block_size)
    for i, seq in enumerate(sequences):
        features[i, : len(seq.features)] = seq.features.float()
        span = len(seq.ids) - 1 - seq.prompt_len
        picks = rng.permutation(span)[:anchors]
        if span < anchors:
            picks = rng.integers(0, span, anchors)
        where[i] = torch.from_numpy(np.sort(picks)) + seq.prompt_len
        anchor_ids[i] = seq.ids[where[i]]
        index = where[i].unsqueeze(1) + offsets
        inside = index < len(seq.ids)
        index = index.clamp_max(len(seq.ids) - 1)
        labels[i] = torch.where(inside, seq.ids[index], -1)
        soft_ids[i] = seq.top_ids[index - seq.prompt_len]
        soft_probs[i] = seq.top_probs[index - seq.prompt_len]
    sharpness = torch.tensor([1 / s.temperature if s.temperature > 0 else 2.0 for s in sequences])
    return Batch(features, where, anchor_ids, labels, soft_ids, soft_probs, sharpness)


def position_weights(block_size: int, decay: float) -> Tensor:
    """`exp(-(k - 1) / decay)` for positions k = 1..n - 1, `[n - 1]`."""
    return torch.exp(-torch.arange(block_size - 1) / decay)


def block_loss(drafter: Drafter, head: Head, batch: Batch, block_size: int, decay: float,
               hard: float, generator: torch.Generator, noise: float = 0.0) -> Tensor:
    """Mean loss in nats per weighted position.

    With a large head, positions are sampled in proportion to their weight instead of
    weighted: the same expectation for less head arithmetic.
    """
    features = batch.features
    if noise:
        scale = drafter.feature_rms * noise
        features = features + torch.randn(features.shape, generator=generator) * scale
    hidden = drafter(features, batch.anchors, head.embedding[batch.anchor_ids],
                     head.embedding[drafter.cfg.mask_token_id], block_size)[:, :, 1:]
    weights = position_weights(block_size, decay).expand(batch.labels.shape).clone()
    weights[batch.labels < 0] = 0
    weights[head.slot[batch.labels.clamp_min(0)] < 0] = 0  # can never be drafted
    if len(head.hot) > 1024:
        weights = (torch.rand(weights.shape, generator=generator) < weights).float()
    used = weights > 0
    logits = hidden[used] @ head.weight.T
    log_probs = logits.log_softmax(dim=-1)
    label_loss = -log_probs.gather(1, head.slot[batch.labels[used]].unsqueeze(1)).squeeze(1)

    soft_slot = head.slot[batch.soft_ids[used]]
    sharpness = batch.sharpness[:, None, None, None].expand(batch.soft_probs.shape)[used]
    soft = batch.soft_probs[used].clamp_min(1e-9) ** sharpness * (soft_slot >= 0)
    soft = soft / soft.sum(dim=-1, keepdim=True).clamp_min(1e-9)
    soft_loss = -(soft * log_probs.gather(1, soft_slot.clamp_min(0))).sum(dim=-1)
    loss = hard * label_loss + (1 - hard) * soft_loss
    return (loss * weights[used]).sum() / weights.sum()


class Sampler:
    """Draws the answers used least so far, and counts passes over the data.

    `epochs` is blocks trained per answer token: 1 means as many anchors as tokens.
    """

    def __init__(self, store: Store, held_out_every: int) -> None:
        self.store, self.held_out_every = store, held_out_every
        self.uses = np.zeros(0, dtype=np.int64)
        self.blocks = 0
        self.refresh()

    def refresh(self) -> None:
        total = self.store.refresh()
        self.uses = np.append(self.uses, np.zeros(total - len(self.uses), dtype=np.int64))
        usable = np.array([row[4] - row[5] >= 4 for row in self.store.rows])
        held = np.arange(total) % self.held_out_every == self.held_out_every - 1
        self.train = np.flatnonzero(usable & ~held)
        self.held_out = np.flatnonzero(usable & held)

    @property
    def epochs(self) -> float:
        return self.blocks / max(1, self.store.answer_tokens)

    def draw(self, rng: np.random.Generator, count: int) -> list[Sequence]:
        if len(self.train) < count:
            raise RuntimeError(f"only {len(self.train)} answers so far; generate more first")
        order = self.uses[self.train] + rng.random(len(self.train))
        picked = self.train[np.argpartition(order, count - 1)[:count]]
        self.uses[picked] += 1
        return [self.store[int(i)] for i in picked]


def feature_rms(store: Store, count: int = 64) -> Tensor:
    """Root mean square per feature channel `[F]` over answer tokens.

    Prompt tokens are left out: the first token of a text has huge values in a few channels.
    """
    rows = np.linspace(0, len(store) - 1, min(count, len(store))).astype(int)
    parts = [seq.features[seq.prompt_len :].float() for seq in (store[int(i)] for i in rows)]
    return torch.cat(parts).pow(2).mean(dim=0).sqrt().clamp_min(1e-6)


def build(args: argparse.Namespace, target: CausalLM, store: Store) -> Drafter:
    """The drafter to train: from `--init`, or new and shaped after the target."""
    torch.manual_seed(args.seed)
    if args.init is not None:
        drafter = Drafter.load(args.init)
    else:
        layers = tuple(args.layers)
        drafter = new_drafter(target, args.draft_layers, args.mlp or target.cfg.mlp_size,
                              args.block_size, args.mask_token_id, layers)
    drafter.set_feature_rms(feature_rms(store))
    return drafter


def run(args: argparse.Namespace) -> None:
    target = CausalLM.from_pretrained(args.target)
    store = Store(args.data)
    if not len(store):
        raise SystemExit(f"no shards in {', '.join(map(str, args.data))}; run `generate` first")
    args.out.mkdir(parents=True, exist_ok=True)
    state = load_checkpoint(args.out / "drafter.pt")
    if state is None:
        drafter = build(args, target, store)
        vocab = target.cfg.vocab_size
        text = text_counts(args.hot_prompts, args.target, vocab) if args.hot_prompts else None
        hot = choose_hot(store, vocab, args.hot, text)
    else:
        drafter = Drafter(DrafterConfig.from_state(state["config"]))
        drafter.load_state_dict(state["model"])
        drafter.feature_rms.copy_(state["feature_rms"])
        hot = state["hot"]
    head = Head(target.model.embed_tokens.weight, target.lm_head.weight, hot)
    optimizer = Optimizer(drafter, lr=args.lr, adam_lr=args.adam_lr,
                          weight_decay=args.weight_decay)
    sampler = Sampler(store, args.held_out_every)
    eval_store = Store(args.eval) if args.eval else None
    step, spent, curve = 0, 0.0, []
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        step, spent, curve = state["step"], state["spent"], state["curve"]
        sampler.blocks = state["blocks"]
        uses = state["uses"][: len(sampler.uses)]
        sampler.uses[: len(uses)] = uses
    del target
    progress = Progress(args.steps, args.minutes, spent)

    def checkpoint() -> None:
        save_checkpoint(args.out / "drafter.pt", {
            "config": drafter.cfg.state(), "model": drafter.state_dict(),
            "feature_rms": drafter.feature_rms, "hot": hot, "optimizer": optimizer.state_dict(),
            "step": step, "spent": progress.spent, "curve": curve, "blocks": sampler.blocks,
            "uses": sampler.uses,
        })

    def measure() -> None:
        if eval_store is not None:
            data: Store = eval_store
            rows = range(min(len(data), args.eval_limit))
        else:
            data, rows = store, sampler.held_out[: args.eval_limit].tolist()
        result = evaluate(drafter, head, (data[int(i)] for i in rows), args.eval_block)
        point = {"step": step, "blocks": sampler.blocks, "epochs": round(sampler.epochs, 3),
                 "answer_tokens": store.answer_tokens, "minutes": round(progress.spent / 60, 1),
                 "mean_tau": result["mean_tau"], "tau": result["all"]["tau"],
                 "ece": result["all"]["ece"], "train_loss": round(average or 0.0, 4)}
        curve.append(point)
        write_json(args.out / "curve.json", curve)
        tqdm.write(json.dumps(point))

    average: float | None = None
    last_saved = time.monotonic()
    bar = tqdm(total=args.steps, initial=step, desc="drafter", mininterval=5)
    if not curve:
        measure()
    while step < args.steps and (done := progress.at(step)) < 1.0:
        rng = np.random.default_rng((args.seed, step))
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        if step % 50 == 0:
            sampler.refresh()
        block = int(rng.choice(args.train_block))
        batch = make_batch(sampler.draw(rng, args.batch), rng, args.anchors, block)
        drafter.train()
        loss = block_loss(drafter, head, batch, block, args.decay, args.hard, generator,
                          args.noise)
        loss.backward()
        optimizer.step(lr_scale(done, step, decay_from=args.decay_from))
        step += 1
        sampler.blocks += args.batch * args.anchors
        average = loss.item() if average is None else 0.97 * average + 0.03 * loss.item()
        bar.update(1)
        bar.set_postfix(loss=f"{average:.3f}", epochs=f"{sampler.epochs:.2f}", done=f"{done:.2f}",
                        refresh=False)
        if step % args.eval_every == 0:
            measure()
        if time.monotonic() - last_saved > 120 or step % args.eval_every == 0:
            checkpoint()
            last_saved = time.monotonic()
        if args.max_epochs and sampler.epochs >= args.max_epochs:
            tqdm.write(f"stopped at {sampler.epochs:.2f} epochs; generate more data to go on")
            break
    bar.close()
    measure()
    checkpoint()
    print(f"{step} steps, {sampler.blocks} blocks, {progress.spent / 60:.1f} minutes")
