"""A crafted pair whose output distribution is known in closed form.

The target's layers contribute nothing (their output projections are zero), so the next token
depends on the current one only: p(y | x) = softmax(head @ norm(embedding[x])). The drafter's layers
contribute nothing either, so at every masked slot it proposes the likeliest token after MASK, which
the head makes a likely token after every other one too. One long answer is then thousands of draws
from known distributions, accepted and rejected at every depth.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, MASK, HIDDEN, LAYERS, HEADS, HEAD_DIM, MLP = 16, 15, 32, 3, 2, 16, 32
FAVOURITE = 3


def transitions() -> torch.Tensor:
    """float64 [VOCAB, VOCAB]: p(next | current) of the target at temperature 1."""
    embedding, head = _weights()
    x = embedding.double()
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return (normed @ head.double().T).softmax(-1)


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.22
    embedding[:, 0] = 1.0  # a constant feature, so that the favourite is likely after every token
    head[:, 0] = 0.0
    head[FAVOURITE, 0] = 2.6
    return embedding, head


def _layer(prefix: str) -> dict[str, torch.Tensor]:
    ones = torch.ones
    kv = HEADS * HEAD_DIM
    shapes = {"q_proj": (kv, HIDDEN), "k_proj": (kv, HIDDEN), "v_proj": (kv, HIDDEN)}
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"{prefix}.self_attn.{name}.weight": torch.randn(*shape, generator=generator) * 0.1
        for name, shape in shapes.items()
    }
    tensors |= {
        f"{prefix}.self_attn.o_proj.weight": torch.zeros(HIDDEN, kv),
        f"{prefix}.self_attn.q_norm.weight": ones(HEAD_DIM),
        f"{prefix}.self_attn.k_norm.weight": ones(HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": torch.randn(MLP, HIDDEN, generator=generator) * 0.1,
        f"{prefix}.mlp.up_proj.weight": torch.randn(MLP, HIDDEN, generator=generator) * 0.1,
        f"{prefix}.mlp.down_proj.weight": torch.zeros(HIDDEN, MLP),
        f"{prefix}.input_layernorm.weight": ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
    }
    return tensors


def write_pair(directory: Path, block_size: int = 8) -> tuple[Path, Path]:
    """Write both checkpoints; returns (target, drafter) directories."""
    embedding, head = _weights()
    shape = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM, "intermediate_size": MLP, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "rope_theta": 10000.0,
        "max_position_embeddings": 2048, "dtype": "float32", "model_type": "qwen3",
        "tie_word_embeddings": False,
    }  # fmt: skip
    target, drafter = directory / "target", directory / "drafter"
    tensors = {
        "model.embed_tokens.weight": embedding, "lm_head.weight": head,
        "model.norm.weight": torch.ones(HIDDEN),
    }  # fmt: skip
    for i in range(LAYERS):
        tensors |= _layer(f"model.layers.{i}")
    _write(target, {**shape, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": LAYERS},
           tensors)  # fmt: skip
    tensors = {
        "fc.weight": torch.zeros(HIDDEN, HIDDEN * (LAYERS - 1)),
        "hidden_norm.weight": torch.ones(HIDDEN), "norm.weight": torch.ones(HIDDEN),
        **_layer("layers.0"),
    }  # fmt: skip
    config = {
        **shape, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1,
        "block_size": block_size, "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(range(LAYERS - 1))},
    }  # fmt: skip
    _write(drafter, config, tensors)
    return target, drafter


def _write(directory: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
