"""A DFlash drafter in plain torch: the arithmetic of SGLang's `DFlashDraftModel`.

A drafter reads two things. The context: hidden states of some target layers at every token
before the anchor, projected once (`fc`, `hidden_norm`) and used as keys and values by every
layer. The block: the anchor token (the last one accepted) followed by mask tokens, embedded by
the target's embedding; every block position sees the whole context and the whole block. The
target's head turns the final hidden state of slot k into the token k places after the anchor.

Parameter names are those of the published checkpoints, so export needs no renaming.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .target import MLP, CausalLM, RMSNorm, TargetConfig, rope_table, rotate
from .target import Attention as TargetAttention


@dataclass(frozen=True)
class DrafterConfig:
    """What the drafter's `config.json` states; `base` describes its layers as a target's."""

    base: TargetConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    @classmethod
    def load(cls, path: Path) -> DrafterConfig:
        raw = json.loads((Path(path) / "config.json").read_text())
        return cls(
            base=TargetConfig.load(path),
            block_size=raw["block_size"],
            mask_token_id=raw["dflash_config"]["mask_token_id"],
            target_layer_ids=tuple(raw["dflash_config"]["target_layer_ids"]),
            num_target_layers=raw["num_target_layers"],
        )

    def to_json(self) -> dict[str, Any]:
        base = self.base
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": base.hidden_size,
            "num_hidden_layers": base.num_layers,
            "num_attention_heads": base.num_heads,
            "num_key_value_heads": base.num_kv_heads,
            "head_dim": base.head_dim,
            "intermediate_size": base.mlp_size,
            "rms_norm_eps": base.rms_norm_eps,
            "vocab_size": base.vocab_size,
            "max_position_embeddings": base.max_positions,
            "rope_theta": base.rope_theta,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "hidden_act": "silu",
            "dtype": "bfloat16",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint; the inverse is `from_state`."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> DrafterConfig:
        base = dict(state["base"])
        base["eos_token_ids"] = tuple(base["eos_token_ids"])
        rest = {k: v for k, v in state.items() if k != "base"}
        rest["target_layer_ids"] = tuple(rest["target_layer_ids"])
        return cls(base=TargetConfig(**base), **rest)


class BlockAttention(TargetAttention):
    """Blocks attend to the context before their anchor and to themselves, without causality."""

    def context(self, c: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Projected context `[B, T, hidden]` to keys and values `[B, KV, T, D]`."""
        k = self.k_norm(self.k_proj(c).unflatten(-1, (self.kv_heads, self.head_dim)))
        v = self.v_proj(c).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(k.transpose(1, 2), cos, sin), v.transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
                hidden: Tensor, blocks: int) -> Tensor:
        """x `[B, A * n, hidden]`; keys, values `[B, KV, T, D]`; hidden `[B, A, T]` marks the
        context tokens a block must not see. Both parts share one softmax."""
        batch, rows, _ = x.shape
        kv, dim, n = self.kv_heads, self.head_dim, rows // blocks
        group = self.heads // kv
        q, k, v = self.project(x, cos, sin)
        q = q.reshape(batch, kv, group * rows, dim) * dim**-0.5
        outside = (q @ keys.transpose(2, 3)).view(batch, kv, group, blocks, n, -1)
        outside = outside.masked_fill(hidden[:, None, None, :, None, :], float("-inf"))
        own_k = k.view(batch, kv, 1, blocks, n, dim)
        own_v = v.view(batch, kv, 1, blocks, n, dim)
        inside = q.view(batch, kv, group, blocks, n, dim) @ own_k.transpose(-1, -2)
        weights = torch.cat([outside, inside], dim=-1).softmax(dim=-1)
        outside, inside = weights.split([keys.shape[2], n], dim=-1)
        out = outside.reshape(batch, kv, group * rows, -1) @ values
        out = out.view(batch, kv, group, blocks, n, dim) + inside @ own_v
        out = out.reshape(batch, self.heads, rows, dim)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class BlockLayer(nn.Module):
    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(cfg)
        self.mlp = MLP(cfg.hidden_size, cfg.mlp_size)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class Drafter(nn.Module):
    """Features are divided by `feature_rms [F]` before `fc`; export folds that into `fc`."""

    def __init__(self, cfg: DrafterConfig) -> None:
        super().__init__()
        self.cfg = cfg
        base = cfg.base
        width = len(cfg.target_layer_ids) * base.hidden_size
        self.fc = nn.Linear(width, base.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(base.hidden_size, base.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(base) for _ in range(base.num_layers))
        self.norm = RMSNorm(base.hidden_size, base.rms_norm_eps)
        self.register_buffer("feature_rms", torch.ones(width), persistent=False)

    def forward(self, features: Tensor, anchors: Tensor, anchor_embeds: Tensor,
                mask_embed: Tensor, block_size: int) -> Tensor:
        """Final hidden states `[B, A, block_size, hidden]`.

        features `[B, T, F]`; anchors `[B, A]`: positions, each block seeing tokens before its
        own; anchor_embeds `[B, A, hidden]`, mask_embed `[hidden]`: the target's embeddings.
        """
        base = self.cfg.base
        batch, blocks = anchors.shape
        length = features.shape[1]
        context = self.hidden_norm(self.fc(features / self.feature_rms))
        ctx_cos, ctx_sin = rope_table(torch.arange(length), base.head_dim, base.rope_theta)
        offsets = torch.arange(block_size)
        positions = (anchors.unsqueeze(-1) + offsets).flatten(1)
        cos, sin = rope_table(positions.unsqueeze(1), base.head_dim, base.rope_theta)
        unseen = torch.arange(length) >= anchors.unsqueeze(-1)
        x = mask_embed.expand(batch, blocks, block_size, -1).clone()
        x[:, :, 0] = anchor_embeds
        x = x.flatten(1, 2)
        for layer in self.layers:
            keys, values = layer.self_attn.context(context, ctx_cos, ctx_sin)
            normed = layer.input_layernorm(x)
            x = x + layer.self_attn(normed, cos, sin, keys, values, unseen, blocks)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (blocks, block_size))

    def set_feature_rms(self, rms: Tensor) -> None:
        """Change the feature scale without changing the function computed."""
        with torch.no_grad():
            self.fc.weight.mul_(rms / self.feature_rms)
            self.feature_rms.copy_(rms)

    @classmethod
    def load(cls, path: Path) -> Drafter:
        """Read a published or exported DFlash directory."""
        model = cls(DrafterConfig.load(path))
        state = load_file(Path(path) / "model.safetensors")
        model.load_state_dict({k: v.float() for k, v in state.items()})
        return model

    def save(self, path: Path) -> None:
        """Write `config.json` and bf16 `model.safetensors` in the published layout."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        state = {k: v.detach().clone() for k, v in self.state_dict().items()}
        state["fc.weight"] /= self.feature_rms
        tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in state.items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "model.safetensors").chmod(0o644)  # safetensors writes 0600
        (path / "config.json").write_text(json.dumps(self.cfg.to_json(), indent=1) + "\n")


def new_drafter(target: CausalLM, layers: int, mlp_size: int, block_size: int,
                mask_token_id: int, target_layer_ids: tuple[int, ...]) -> Drafter:
    """A drafter shaped after `target`, its layers copied from the target's last ones.

    `fc` begins as the mean of the captured layers. An MLP narrower than the target's takes
    its first units.
    """
    cfg = target.cfg
    if max(target_layer_ids) > cfg.num_layers - 2:
        raise ValueError(f"layer ids must be at most {cfg.num_layers - 2}: {target_layer_ids}")
    base = {**asdict(cfg), "num_layers": layers, "mlp_size": mlp_size, "qk_norm": True,
            "tied": False}
    drafter = Drafter(DrafterConfig(TargetConfig(**base), block_size, mask_token_id,
                                    target_layer_ids, cfg.num_layers))
    with torch.no_grad():
        eye = torch.eye(cfg.hidden_size) / len(target_layer_ids)
        drafter.fc.weight.copy_(eye.repeat(1, len(target_layer_ids)))
        drafter.fc.weight.add_(torch.randn_like(drafter.fc.weight), alpha=0.01)
        for new, old in zip(drafter.layers, target.model.layers[-layers:], strict=True):
            for name, weight in new.named_parameters():
                source = dict(old.named_parameters()).get(name)
                if source is not None:
                    weight.copy_(source[tuple(slice(size) for size in weight.shape)])
        drafter.norm.weight.copy_(target.model.norm.weight)
    return drafter
