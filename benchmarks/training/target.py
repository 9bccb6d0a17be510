"""A small Llama / Qwen3 causal language model in plain torch.

One module serves three purposes: training a target from scratch, generating text from a
target, and capturing the hidden states a DFlash drafter is conditioned on. Parameter names
are those of Hugging Face checkpoints, so loading and saving need no renaming.

Architecture (as in `transformers` and SGLang): pre-norm blocks, grouped-query attention with
rotate-half rotary embeddings, SwiGLU; Qwen3 additionally normalises each query and key head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TargetConfig:
    """The numbers of `config.json` that the forward pass depends on."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    rms_norm_eps: float
    rope_theta: float
    qk_norm: bool
    tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, path: Path) -> TargetConfig:
        """Read a Hugging Face directory's `config.json` (Llama or Qwen3)."""
        raw = json.loads((Path(path) / "config.json").read_text())
        kind = raw.get("model_type")
        if kind not in ("llama", "qwen3"):
            raise ValueError(f"{path}: model_type {kind!r} is not supported (llama and qwen3 are)")
        if raw.get("attention_bias"):
            raise ValueError(f"{path}: attention_bias is not supported")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"{path}: rope_type {rope['rope_type']!r} is not supported")
        heads = raw["num_attention_heads"]
        eos = raw.get("eos_token_id")
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads", heads),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            mlp_size=raw["intermediate_size"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            qk_norm=kind == "qwen3",
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_positions=raw.get("max_position_embeddings", 4096),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., head_dim]` (two equal halves) of integer positions `[...]`."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angle = positions.float().unsqueeze(-1) * (1.0 / theta**exponent)
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotate-half rotary embeddings; `cos`, `sin` broadcast against `x`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections and per-head norms; the attention itself is the caller's `attend`."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        hidden, dim = cfg.hidden_size, cfg.head_dim
        self.q_proj = nn.Linear(hidden, cfg.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, cfg.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, cfg.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(cfg.num_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, cfg.rms_norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, cfg.rms_norm_eps) if cfg.qk_norm else nn.Identity()

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, T, hidden]` to rotated q `[B, H, T, D]`, rotated k and v `[B, KV, T, D]`."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.self_attn = Attention(cfg)
        self.mlp = MLP(cfg.hidden_size, cfg.mlp_size)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Full-sequence causal pass, `[B, T, hidden]` to the same."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        x = x + self.self_attn.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class CausalLM(nn.Module):
    """Decoder and language-model head, float32 in training and evaluation."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Decoder(cfg)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        if cfg.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_pretrained(cls, path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
        """Load a Hugging Face directory (one or several `*.safetensors`)."""
        path = Path(path)
        state: dict[str, Tensor] = {}
        for shard in sorted(path.glob("*.safetensors")):
            state.update(load_file(shard))
        if not state:
            raise FileNotFoundError(f"{path} holds no *.safetensors file")
        with torch.device("meta"):
            model = cls(TargetConfig.load(path))
        model = model.to_empty(device="cpu").to(dtype)
        if model.cfg.tied:
            model.lm_head.weight = model.model.embed_tokens.weight
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict({k: v.to(dtype) for k, v in state.items()})
        return model.eval()

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `model.safetensors`; a tied head is left out, as Hugging Face does."""
        state = self.state_dict()
        if self.cfg.tied:
            state.pop("lm_head.weight")
        tensors = {k: v.detach().to(dtype).contiguous() for k, v in state.items()}
        file = Path(path) / "model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors writes 0600

    def init_weights(self) -> None:
        """Normal(0, 0.02), residual projections shrunk by the depth (GPT-2's rule)."""
        residual = (2 * self.cfg.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                shrink = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 * shrink)

    def hidden(self, ids: Tensor, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Full causal pass over `ids [B, T]`.

        Returns the normalised last hidden states `[B, T, hidden]` and, if `capture` names
        layers, the outputs of those layers side by side `[B, T, len(capture) * hidden]`.
        Id v means the output of layer v, the convention of `dflash_config.target_layer_ids`.
        """
        cos, sin = rope_table(torch.arange(ids.shape[1]), self.cfg.head_dim, self.cfg.rope_theta)
        x = self.model.embed_tokens(ids)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        kept = {}
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if index in capture:
                kept[index] = x
        features = torch.cat([kept[i] for i in capture], dim=-1) if capture else None
        return self.model.norm(x), features

    def forward(self, ids: Tensor) -> Tensor:
        """Next-token logits `[B, T, vocab]`."""
        return self.lm_head(self.hidden(ids)[0])
