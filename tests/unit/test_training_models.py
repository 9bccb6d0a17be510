"""The models of the training scripts: target, generation, block layout, export."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import (
    LAYERS,
    MASK,
    VOCAB,
    answers,
    random_drafter,
    shards,
    target,
    write_target,
)
from training.attend import attend
from training.decode import Engine, common_prefix, top_candidates
from training.drafter import Drafter, new_drafter
from training.store import Store, done_indices
from training.target import CausalLM, TargetConfig, rms_norm, rope_table, rotate

__all__ = ["answers", "shards", "target"]  # fixtures

# ---- target -------------------------------------------------------------------------------


@pytest.mark.parametrize(("qk_norm", "tied"), [(True, True), (False, False)])
def test_target_matches_transformers(tmp_path, qk_norm, tied) -> None:
    from transformers import AutoModelForCausalLM

    write_target(tmp_path / "t", qk_norm, tied)
    ours = CausalLM.from_pretrained(tmp_path / "t")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "t", dtype=torch.float32).eval()
    ids = torch.randint(0, VOCAB, (2, 17))
    with torch.no_grad():
        expected = theirs(ids, output_hidden_states=True)
        _, features = ours.hidden(ids, capture=LAYERS)
        torch.testing.assert_close(ours(ids), expected.logits, atol=2e-4, rtol=1e-4)
    # hidden_states[0] is the embedding, so the output of layer v is entry v + 1
    wanted = torch.cat([expected.hidden_states[v + 1] for v in LAYERS], dim=-1)
    torch.testing.assert_close(features, wanted, atol=2e-4, rtol=1e-4)


def test_unsupported_targets_are_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="mamba"):
        TargetConfig.load(tmp_path)


# ---- generation ---------------------------------------------------------------------------


def test_attend_matches_torch() -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 2, 2, 8)
    keys, values = torch.randn(2, 3, 2, 20, 8).bfloat16()
    lengths = np.array([1, 20, 7])
    out = torch.zeros_like(q)
    attend(
        q.numpy(),
        keys.view(torch.uint16).numpy(),
        values.view(torch.uint16).numpy(),
        lengths,
        np.float32(0.3),
        out.numpy(),
    )
    for b, n in enumerate(lengths):
        scores = q[b] @ keys[b, :, :n].float().transpose(1, 2) * 0.3
        wanted = scores.softmax(-1) @ values[b, :, :n].float()
        torch.testing.assert_close(out[b], wanted, atol=1e-5, rtol=1e-5)


def test_every_job_is_answered_with_its_features(target, answers) -> None:
    _, model = target
    assert sorted(a.index for a in answers) == list(range(12))
    for answer in answers:
        assert len(answer.ids) <= answer.prompt_len + 30
        with torch.no_grad():
            hidden, features = model.hidden(answer.ids[None, :-1], LAYERS)
            logits = model.lm_head(hidden)[0, answer.prompt_len - 1 :]
        error = (answer.features.float() - features[0]).norm() / features.norm()
        assert error < 0.02  # the KV cache and the stored features are bf16
        agree = (logits.argmax(-1) == answer.ids[answer.prompt_len :]).float().mean()
        assert agree > 0.9
        assert torch.equal(answer.top_ids[:, 0], answer.ids[answer.prompt_len :])
        probs = logits.softmax(-1).gather(1, answer.top_ids)
        torch.testing.assert_close(answer.top_probs, probs, atol=0.05, rtol=0.1)


def test_shared_prefix_changes_nothing(target) -> None:
    _, model = target
    prompts = [[5, 6, 7, 8, 9 + i] for i in range(4)]
    plain = Engine(model, 2, 32)
    shared = Engine(model, 2, 32)
    shared.share_prefix(common_prefix(prompts))
    assert shared.prefix == [5, 6, 7, 8]
    jobs = [(i, p, 0.0) for i, p in enumerate(prompts)]
    for left, right in zip(plain.run(jobs, 12), shared.run(jobs, 12), strict=True):
        assert left.index == right.index and torch.equal(left.ids, right.ids)


def test_int8_products_stay_close() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no fbgemm")
    from training.linear import int8_product

    torch.manual_seed(0)
    weight, x = torch.randn(40, 64), torch.randn(9, 64)
    x[3] *= 1000  # an outlier row must not spoil the others
    out = int8_product(weight)(x)
    error = (out - x @ weight.T).norm(dim=1) / (x @ weight.T).norm(dim=1)
    assert error.max() < 0.03


@pytest.mark.parametrize("vocab", [40, 4096])
def test_top_candidates_is_exact(vocab) -> None:
    logits = torch.randn(5, vocab)
    values, ids = top_candidates(logits)
    wanted = logits.topk(8)
    assert torch.equal(values, wanted.values) and torch.equal(ids, wanted.indices)


def test_shards_round_trip(answers, shards) -> None:
    store = Store([shards])
    assert len(store) == 12 and done_indices(shards) == set(range(12))
    for row, answer in enumerate(answers):
        seq = store[row]
        assert torch.equal(seq.ids, answer.ids) and torch.equal(seq.features, answer.features)
        assert torch.equal(seq.top_ids, answer.top_ids) and seq.kind == row // 6
    assert store.answer_tokens == sum(len(a.ids) - a.prompt_len for a in answers)


# ---- drafter ------------------------------------------------------------------------------


def naive_block(drafter: Drafter, features: torch.Tensor, anchor: int, embeds: torch.Tensor):
    """One block, written from the definition: one softmax over context and block."""
    base, n = drafter.cfg.base, len(embeds)
    context = drafter.hidden_norm(drafter.fc(features[:anchor] / drafter.feature_rms))
    x = embeds
    for layer in drafter.layers:
        attn = layer.self_attn
        normed = layer.input_layernorm(x)
        source = torch.cat([context, normed])
        positions = torch.arange(anchor + n)
        cos, sin = rope_table(positions, base.head_dim, base.rope_theta)
        q = attn.q_norm(attn.q_proj(normed).view(n, base.num_heads, -1))
        k = attn.k_norm(attn.k_proj(source).view(anchor + n, base.num_kv_heads, -1))
        v = attn.v_proj(source).view(anchor + n, base.num_kv_heads, -1)
        q = rotate(q, cos[anchor:, None], sin[anchor:, None])
        k = rotate(k, cos[:, None], sin[:, None])
        heads = []
        for h in range(base.num_heads):
            kv = h * base.num_kv_heads // base.num_heads
            weights = (q[:, h] @ k[:, kv].T * base.head_dim**-0.5).softmax(-1)
            heads.append(weights @ v[:, kv])
        x = x + attn.o_proj(torch.cat(heads, dim=-1))
        x = x + layer.mlp(rms_norm(x, layer.post_attention_layernorm.weight, base.rms_norm_eps))
    return drafter.norm(x)


@torch.no_grad()
def test_blocks_match_the_definition(target) -> None:
    drafter = random_drafter(target[1])
    drafter.set_feature_rms(torch.rand(64) + 0.5)
    features, mask = torch.randn(2, 11, 64), torch.randn(32)
    anchors = torch.tensor([[1, 4, 11], [3, 10, 2]])
    first = torch.randn(2, 3, 32)
    out = drafter(features, anchors, first, mask, 5)
    for b in range(2):
        for a in range(3):
            embeds = torch.cat([first[b, a][None], mask.expand(4, -1)])
            wanted = naive_block(drafter, features[b], int(anchors[b, a]), embeds)
            torch.testing.assert_close(out[b, a], wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_blocks_see_neither_each_other_nor_the_future(target) -> None:
    drafter = random_drafter(target[1])
    features, mask = torch.randn(1, 12, 64), torch.randn(32)
    anchors, first = torch.tensor([[4, 9]]), torch.randn(1, 2, 32)
    before = drafter(features, anchors, first, mask, 5)
    features[:, 4:] += 1
    first[:, 1] += 1
    after = drafter(features, anchors, first, mask, 5)
    assert torch.equal(before[0, 0], after[0, 0])
    assert not torch.allclose(before[0, 1], after[0, 1])


@torch.no_grad()
def test_export_round_trip(target, tmp_path) -> None:
    drafter = random_drafter(target[1])
    drafter.set_feature_rms(torch.rand(64) + 0.5)
    drafter.save(tmp_path / "d")
    layer = {
        f"self_attn.{n}.weight"
        for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    layer |= {f"mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    names = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    state = load_file(tmp_path / "d" / "model.safetensors")
    assert set(state) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert {v.dtype for v in state.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": list(LAYERS)}
    again = Drafter.load(tmp_path / "d")
    assert again.cfg.block_size == 5
    inputs = (
        torch.randn(1, 9, 64),
        torch.tensor([[5, 9]]),
        torch.randn(1, 2, 32),
        torch.randn(32),
        5,
    )
    torch.testing.assert_close(again(*inputs), drafter(*inputs), atol=0.05, rtol=0.05)


def test_last_target_layer_is_refused(target) -> None:
    with pytest.raises(ValueError, match="at most 1"):
        new_drafter(target[1], 2, 40, 5, MASK, (0, 2))
