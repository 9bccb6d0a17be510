"""Batched generation with continuous refill on one CPU thread.

`Engine` holds a fixed number of slots, each with its part of a bf16 KV cache. A slot whose
answer has ended takes the next prompt at once, so the matrix products stay full. The hidden
states a drafter is conditioned on, and the most likely next tokens, are by-products of the
forward pass and are kept with each answer. A prefix shared by all prompts (a chat template's
system turn) is computed once, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .attend import attend
from .linear import Product, float_product, int8_product
from .target import CausalLM, rms_norm, rope_table, rotate

TOP = 8  # next-token candidates kept per position
CHUNK = 128  # vocabulary chunk for the exact two-step top-k


@dataclass(frozen=True)
class Answer:
    """One finished sequence.

    ids `[N]`: prompt and answer (the end token included); features `[N - 1, F]` bf16: captured
    hidden states of every token but the last; top_ids, top_probs `[N - prompt_len, TOP]`: the
    target's distribution behind each answer token.
    """

    index: int
    prompt_len: int
    temperature: float
    ids: Tensor
    features: Tensor
    top_ids: Tensor
    top_probs: Tensor


@dataclass
class Slot:
    index: int
    temperature: float
    ids: list[int]
    prompt_len: int
    limit: int


def top_candidates(logits: Tensor, count: int = TOP) -> tuple[Tensor, Tensor]:
    """Exact `topk(logits, count)` of `[N, V]`, searching only the chunks with the best maxima."""
    rows, vocab = logits.shape
    chunk = CHUNK if vocab % CHUNK == 0 else 1
    if vocab // chunk <= count:
        values, ids = logits.topk(min(count, vocab), dim=-1)
        return values, ids
    chunks = logits.view(rows, vocab // chunk, chunk)
    best = chunks.amax(dim=-1).topk(count, dim=-1).indices
    picked = chunks.gather(1, best.unsqueeze(-1).expand(-1, -1, chunk)).flatten(1)
    values, where = picked.topk(count, dim=-1)
    return values, best.gather(1, where // chunk) * chunk + where % chunk


class FusedLayer:
    """One decoder layer's weights, q/k/v and gate/up merged into one product each."""

    def __init__(self, layer: torch.nn.Module, make: type[Product]) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        weights = [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]
        self.sizes = [len(w) for w in weights]
        self.qkv = make(torch.cat(weights))
        self.out = make(attn.o_proj.weight)
        self.gate_up = make(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.down = make(mlp.down_proj.weight)
        self.norm_in = layer.input_layernorm.weight.detach()
        self.norm_mlp = layer.post_attention_layernorm.weight.detach()
        self.q_norm = getattr(attn.q_norm, "weight", None)
        self.k_norm = getattr(attn.k_norm, "weight", None)


class Engine:
    def __init__(self, model: CausalLM, slots: int, max_len: int, capture: tuple[int, ...] = (),
                 int8: bool = False) -> None:
        cfg = model.cfg
        self.cfg, self.slots, self.max_len, self.capture = cfg, slots, max_len, capture
        self.embedding = model.model.embed_tokens.weight.detach().float()
        self.final_norm = model.model.norm.weight.detach().float()
        self.exact_layers = [FusedLayer(layer, float_product) for layer in model.model.layers]
        self.exact_head = float_product(model.lm_head.weight)
        if int8:
            self.layers = [FusedLayer(layer, int8_product) for layer in model.model.layers]
            self.head = int8_product(model.lm_head.weight)
        else:
            self.layers, self.head = self.exact_layers, self.exact_head
        shape = (cfg.num_layers, slots, cfg.num_kv_heads, max_len, cfg.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16)
        self.values = torch.zeros(shape, dtype=torch.bfloat16)
        self.cos, self.sin = rope_table(torch.arange(max_len), cfg.head_dim, cfg.rope_theta)
        width = len(capture) * cfg.hidden_size
        self.features = torch.zeros((slots, max_len, width), dtype=torch.bfloat16)
        self.prefix: list[int] = []

    # ---- one forward pass -------------------------------------------------------------

    def _qkv(self, layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """`x [N, hidden]` to rotated q `[N, H, D]`, k, v `[N, KV, D]`; cos, sin `[N, D]`."""
        cfg = self.cfg
        q, k, v = layer.qkv(rms_norm(x, layer.norm_in, cfg.rms_norm_eps)).split(layer.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, cfg.head_dim)) for t in (q, k, v))
        if layer.q_norm is not None:
            q = rms_norm(q, layer.q_norm, cfg.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, cfg.rms_norm_eps)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _finish(self, layer: FusedLayer, x: Tensor, attention: Tensor) -> Tensor:
        x = x + layer.out(attention)
        gate, up = layer.gate_up(rms_norm(x, layer.norm_mlp, self.cfg.rms_norm_eps)).chunk(2, -1)
        return x + layer.down(F.silu(gate) * up)

    def _logits(self, x: Tensor, exact: bool = False) -> Tensor:
        head = self.exact_head if exact else self.head
        return head(rms_norm(x, self.final_norm, self.cfg.rms_norm_eps))

    def prefill(self, slot: int, ids: list[int], exact: bool = False) -> Tensor:
        """Run a whole prompt in one slot; returns the last token's logits `[V]`."""
        group = self.cfg.num_heads // self.cfg.num_kv_heads
        start = len(self.prefix)
        end = len(ids)
        x = self.embedding[torch.tensor(ids[start:])]
        cos, sin = self.cos[start:end], self.sin[start:end]
        mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        kept = []
        for index, layer in enumerate(self.exact_layers if exact else self.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys, values = self.keys[index, slot], self.values[index, slot]
            keys[:, start:end] = k.transpose(0, 1)
            values[:, start:end] = v.transpose(0, 1)
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1), keys[:, :end].float().repeat_interleave(group, 0),
                values[:, :end].float().repeat_interleave(group, 0), attn_mask=mask,
            )
            x = self._finish(layer, x, out.transpose(0, 1).flatten(1))
            if index in self.capture:
                kept.append(x)
        if kept:
            self.features[slot, start:end] = torch.cat(kept, dim=-1)
        return self._logits(x[-1:], exact)[0]

    def share_prefix(self, ids: list[int]) -> None:
        """Compute `ids` once, in float32, and copy them into every slot."""
        self.prefix = []
        if not ids:
            return
        self.prefill(0, ids, exact=True)
        end = len(ids)
        self.keys[:, 1:, :, :end] = self.keys[:, :1, :, :end]
        self.values[:, 1:, :, :end] = self.values[:, :1, :, :end]
        self.features[1:, :end] = self.features[:1, :end]
        self.prefix = list(ids)

    def drop_exact(self) -> None:
        """Free the float32 weights once the shared prefix is in place (int8 only)."""
        if self.layers is not self.exact_layers:
            self.exact_layers, self.exact_head = self.layers, self.head

    def step(self, tokens: Tensor, positions: Tensor, active: np.ndarray) -> Tensor:
        """One token per slot, `tokens [S]` at `positions [S]`; returns logits `[S, V]`."""
        cfg = self.cfg
        rows = torch.arange(self.slots)
        lengths = np.where(active, positions.numpy() + 1, 0)
        x = self.embedding[tokens]
        cos, sin = self.cos[positions], self.sin[positions]
        out = torch.zeros(self.slots, cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads,
                          cfg.head_dim)
        kept = []
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys, values = self.keys[index], self.values[index]
            keys[rows, :, positions] = k.to(torch.bfloat16)
            values[rows, :, positions] = v.to(torch.bfloat16)
            attend(q.reshape(out.shape).numpy(), keys.view(torch.uint16).numpy(),
                   values.view(torch.uint16).numpy(), lengths,
                   np.float32(cfg.head_dim**-0.5), out.numpy())
            x = self._finish(layer, x, out.flatten(1))
            if index in self.capture:
                kept.append(x)
        if kept:
            self.features[rows, positions] = torch.cat(kept, dim=-1).to(torch.bfloat16)
        return self._logits(x)

    # ---- the loop ---------------------------------------------------------------------

    @torch.no_grad()
    def run(self, jobs: Iterable[tuple[int, list[int], float]], max_new: int,
            seed: int = 0) -> Iterator[Answer]:
        """Answer `(index, prompt ids, temperature)` jobs; yields answers as they finish."""
        jobs = iter(jobs)
        generator = torch.Generator().manual_seed(seed)
        slots: list[Slot | None] = [None] * self.slots
        tops: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.slots)]
        while True:
            for place in range(self.slots):
                while slots[place] is None:
                    job = next(jobs, None)
                    if job is None:
                        break
                    index, prompt, temperature = job
                    limit = min(self.max_len, len(prompt) + max_new)
                    if len(prompt) >= self.max_len:
                        continue
                    slots[place] = Slot(index, temperature, list(prompt), len(prompt), limit)
                    tops[place] = []
                    logits = self.prefill(place, prompt)
                    self._extend([place], logits[None], slots, tops, generator)
                    if self._ended(slots[place]):
                        yield self._answer(place, slots, tops)
            active = np.array([slot is not None for slot in slots])
            if not active.any():
                return
            tokens = torch.tensor([slot.ids[-1] if slot else 0 for slot in slots])
            positions = torch.tensor([len(slot.ids) - 1 if slot else 0 for slot in slots])
            if not active.all():  # an idle slot still writes its KV: keep that off the prefix
                positions[torch.from_numpy(~active)] = self.max_len - 1
            logits = self.step(tokens, positions, active)
            places = np.flatnonzero(active).tolist()
            self._extend(places, logits[places], slots, tops, generator)
            for place in places:
                if self._ended(slots[place]):
                    yield self._answer(place, slots, tops)

    def _extend(self, places: list[int], logits: Tensor, slots: list, tops: list,
                generator: torch.Generator) -> None:
        """Choose each place's next token: the argmax, or a sample among the best candidates."""
        values, ids = top_candidates(logits)
        probs = (values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        for row, place in enumerate(places):
            slot = slots[place]
            token = int(ids[row, 0])
            if slot.temperature > 0:
                scores, wide = top_candidates(logits[row : row + 1], 64)
                weights = torch.softmax(scores[0] / slot.temperature, dim=-1)
                token = int(wide[0, torch.multinomial(weights, 1, generator=generator)])
            slot.ids.append(token)
            tops[place].append((ids[row], probs[row]))

    def _ended(self, slot: Slot) -> bool:
        return slot.ids[-1] in self.cfg.eos_token_ids or len(slot.ids) >= slot.limit

    def _answer(self, place: int, slots: list, tops: list) -> Answer:
        slot = slots[place]
        slots[place] = None
        ids, probs = zip(*tops[place], strict=True)
        return Answer(
            index=slot.index, prompt_len=slot.prompt_len, temperature=slot.temperature,
            ids=torch.tensor(slot.ids), features=self.features[place, : len(slot.ids) - 1].clone(),
            top_ids=torch.stack(ids), top_probs=torch.stack(probs),
        )


def common_prefix(prompts: list[list[int]]) -> list[int]:
    """The longest prefix all prompts share, never a whole prompt."""
    if len(prompts) < 2:
        return []
    low, high = min(prompts), max(prompts)
    limit = min(map(len, prompts)) - 1
    length = next((i for i in range(limit) if low[i] != high[i]), limit)
    return low[:length]


def generate_all(model: CausalLM, prompts: list[list[int]], max_new: int,
                 slots: int = 32) -> list[list[int]]:
    """Greedy answers (without prompts), in the order of `prompts`."""
    engine = Engine(model, min(slots, len(prompts)), max(map(len, prompts)) + max_new)
    jobs = ((i, prompt, 0.0) for i, prompt in enumerate(prompts))
    done = {a.index: a.ids[a.prompt_len :].tolist() for a in engine.run(jobs, max_new)}
    return [done[i] for i in range(len(prompts))]
