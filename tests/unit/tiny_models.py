"""Tiny random models shared by the tests of the training scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from training.decode import Answer, Engine
from training.drafter import Drafter, new_drafter
from training.store import write_shard
from training.target import CausalLM, TargetConfig

VOCAB, MASK, LAYERS = 64, 63, (0, 1)


def tiny_config(qk_norm: bool, tied: bool) -> TargetConfig:
    return TargetConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_size=48,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        qk_norm=qk_norm,
        tied=tied,
        max_positions=128,
        eos_token_ids=(2,),
    )


def write_target(path: Path, qk_norm: bool = True, tied: bool = True) -> CausalLM:
    """A random target as a Hugging Face directory with float32 weights."""
    torch.manual_seed(0)
    model = CausalLM(tiny_config(qk_norm, tied))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim == 2 else weight.uniform_(0.5, 1.5)
    path.mkdir()
    model.save(path, torch.float32)
    cfg = model.cfg
    config = {
        "model_type": "qwen3" if qk_norm else "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp_size,
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_theta": cfg.rope_theta,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "max_position_embeddings": 128,
    }
    (path / "config.json").write_text(json.dumps(config))
    return model.eval()


def random_drafter(model: CausalLM, block_size: int = 5) -> Drafter:
    torch.manual_seed(3)
    return new_drafter(model, 2, 40, block_size, MASK, LAYERS).eval()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalLM]:
    path = tmp_path_factory.mktemp("models") / "target"
    return path, write_target(path)


@pytest.fixture(scope="module")
def answers(target) -> list[Answer]:
    """Twelve answers from three slots, so slots are refilled."""
    engine = Engine(target[1], slots=3, max_len=48, capture=LAYERS)
    rng = np.random.default_rng(1)
    jobs = [(i, rng.integers(3, 60, 4 + i % 3).tolist(), 0.0) for i in range(12)]
    return list(engine.run(jobs, max_new=30))


@pytest.fixture
def shards(answers, tmp_path) -> Path:
    write_shard(tmp_path / "data", answers[:6], [0] * 6)
    write_shard(tmp_path / "data", answers[6:], [1] * 6)
    return tmp_path / "data"
