"""Turn a Llama GGUF into a Hugging Face checkpoint (bf16 safetensors, config, tokenizer).

Three things differ between the two formats:

- GGUF stores the rows of q and k interleaved (x0 y0 x1 y1 ..) for rotary embeddings of
  neighbouring pairs; Hugging Face rotates the two halves of a head, so rows are put back.
- Tensors are block-quantised; `gguf.dequantize` restores float32 of shape `[out, in]`.
- The tokenizer is a list of tokens and merges in the file's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

CONTROL_TOKEN = 3  # gguf's token type for special tokens

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"


def restore_rope_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of q or k: `[heads * D, in]`, pairs (i, i + D/2) apart again."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def model_config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The `config.json` of a Llama checkpoint from GGUF metadata."""
    if meta["general.architecture"] != "llama":
        raise ValueError(f"not a Llama GGUF: {meta['general.architecture']}")
    heads = meta["llama.attention.head_count"]
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        # stored as float32: 1e-5 reads back as 9.9999997e-06
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "max_position_embeddings": meta["llama.context_length"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
    }


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that splits numbers into single digits (`pre = smollm`)."""
    if (model := meta["tokenizer.ggml.model"]) != "gpt2":
        raise ValueError(f"not a byte-level BPE tokenizer: {model}")
    if (pre := meta["tokenizer.ggml.pre"]) != "smollm":
        raise ValueError(f"unknown pre-tokenizer: {pre}")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def tensors(
    reader: gguf.GGUFReader, meta: dict[str, Any], progress: bool
) -> Iterable[tuple[str, torch.Tensor]]:
    """Dequantised bf16 tensors under their Hugging Face names."""
    heads = {
        "q_proj": meta["llama.attention.head_count"],
        "k_proj": meta["llama.attention.head_count_kv"],
    }
    for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor", disable=not progress):
        name = hf_name(tensor.name)
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if part in name:
                weight = restore_rope_rows(weight, count)
        yield name, torch.tensor(weight).to(torch.bfloat16)


def convert(source: Path, target: Path, progress: bool = False) -> None:
    """Write `source` (a Llama GGUF) as a Hugging Face checkpoint into directory `target`."""
    reader = gguf.GGUFReader(source)
    meta = metadata(reader)
    state = dict(tensors(reader, meta, progress))
    config = model_config(meta, tied="lm_head.weight" not in state)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    target.mkdir(parents=True, exist_ok=True)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    build_tokenizer(meta).save(str(target / "tokenizer.json"))
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config(meta)),
    ):
        (target / name).write_text(json.dumps(value, indent=1) + "\n")
