"""The training scripts on tiny random models: layout, generation, resumption, export."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from training import cli, corpus, train
from training.attend import attend
from training.byte_tokenizer import save_tokenizer
from training.decode import Answer, Engine, common_prefix, top_candidates
from training.drafter import Drafter, new_drafter
from training.evaluate import Head, calibration_error, evaluate, summary, walk
from training.hot import choose_hot
from training.optim import lr_scale, orthogonalise
from training.store import Sequence, Store, done_indices, write_shard
from training.target import CausalLM, TargetConfig, rms_norm, rope_table, rotate

VOCAB, MASK, LAYERS = 64, 63, (0, 1)


def tiny_config(qk_norm: bool, tied: bool) -> TargetConfig:
    return TargetConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
        mlp_size=48, rms_norm_eps=1e-6, rope_theta=10000.0, qk_norm=qk_norm, tied=tied,
        max_positions=128, eos_token_ids=(2,),
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
        "model_type": "qwen3" if qk_norm else "llama", "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size, "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads, "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim, "intermediate_size": cfg.mlp_size,
        "rms_norm_eps": cfg.rms_norm_eps, "rope_theta": cfg.rope_theta,
        "tie_word_embeddings": tied, "eos_token_id": 2, "max_position_embeddings": 128,
    }
    (path / "config.json").write_text(json.dumps(config))
    return model.eval()


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
    attend(q.numpy(), keys.view(torch.uint16).numpy(), values.view(torch.uint16).numpy(), lengths,
           np.float32(0.3), out.numpy())
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


def random_drafter(model: CausalLM, block_size: int = 5) -> Drafter:
    torch.manual_seed(3)
    return new_drafter(model, 2, 40, block_size, MASK, LAYERS).eval()


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
    layer = {f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm",
                                               "k_norm")}
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
    inputs = (torch.randn(1, 9, 64), torch.tensor([[5, 9]]), torch.randn(1, 2, 32),
              torch.randn(32), 5)
    torch.testing.assert_close(again(*inputs), drafter(*inputs), atol=0.05, rtol=0.05)


def test_last_target_layer_is_refused(target) -> None:
    with pytest.raises(ValueError, match="at most 1"):
        new_drafter(target[1], 2, 40, 5, MASK, (0, 2))


# ---- training -----------------------------------------------------------------------------


def train_args(target: Path, data: Path, out: Path, *extra: str) -> argparse.Namespace:
    return cli.parser().parse_args([
        "train", "--target", str(target), "--data", str(data), "--out", str(out),
        "--layers", "0", "1", "--mask-token-id", str(MASK), "--block-size", "4",
        "--train-block", "6", "--steps", "8", "--batch", "2", "--anchors", "8",
        "--eval-every", "100", "--held-out-every", "6", "--noise", "0.1", *extra,
    ])


def test_resume_gives_the_same_result(target, shards, tmp_path) -> None:
    train.run(train_args(target[0], shards, tmp_path / "whole"))
    total = Store([shards]).answer_tokens
    part = str(3.5 * 2 * 8 / total)  # stop after four of the eight steps
    train.run(train_args(target[0], shards, tmp_path / "parts", "--max-epochs", part))
    half = torch.load(tmp_path / "parts" / "drafter.pt", weights_only=False)
    assert half["step"] == 4
    train.run(train_args(target[0], shards, tmp_path / "parts"))
    whole, parts = (
        torch.load(tmp_path / name / "drafter.pt", weights_only=False)["model"]
        for name in ("whole", "parts")
    )
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name


def test_training_lowers_the_loss(target, shards, tmp_path) -> None:
    _, model = target
    store = Store([shards])
    drafter = random_drafter(model)
    drafter.set_feature_rms(train.feature_rms(store))
    head = Head(model.model.embed_tokens.weight, model.lm_head.weight)
    sequences = [store[i] for i in range(4)]
    batch = train.make_batch(sequences, np.random.default_rng(0), 8, 6)
    optimizer = train.Optimizer(drafter, lr=1e-2, adam_lr=1e-3)
    losses = []
    for _ in range(30):
        loss = train.block_loss(drafter, head, batch, 6, 4.0, 0.5, torch.Generator())
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_batches_pair_anchors_with_what_follows(shards) -> None:
    store = Store([shards])
    sequences = [store[0], store[7]]
    batch = train.make_batch(sequences, np.random.default_rng(0), 5, 6)
    for b, seq in enumerate(sequences):
        for a, anchor in enumerate(batch.anchors[b].tolist()):
            assert seq.prompt_len <= anchor < len(seq.ids) - 1
            assert batch.anchor_ids[b, a] == seq.ids[anchor]
            for k in range(1, 6):
                label = int(batch.labels[b, a, k - 1])
                assert label == (int(seq.ids[anchor + k]) if anchor + k < len(seq.ids) else -1)
                if label >= 0:
                    row = anchor + k - seq.prompt_len
                    assert torch.equal(batch.soft_ids[b, a, k - 1], seq.top_ids[row])


def test_cold_labels_do_not_count(target, shards) -> None:
    _, model = target
    batch = train.make_batch([Store([shards])[0]], np.random.default_rng(0), 4, 4)
    cold = int(batch.labels[0, 0, 0])
    hot = torch.tensor([i for i in range(VOCAB) if i != cold])
    head = Head(model.model.embed_tokens.weight, model.lm_head.weight, hot)
    loss = train.block_loss(random_drafter(model), head, batch, 4, 4.0, 1.0, torch.Generator())
    assert torch.isfinite(loss)


def test_hot_tokens_are_the_frequent_ones(shards) -> None:
    store = Store([shards])
    ids = torch.cat([store[i].ids[store[i].prompt_len :] for i in range(len(store))])
    counts = ids.bincount(minlength=VOCAB)
    hot = choose_hot(store, VOCAB, 16)
    assert len(hot) == 16 and torch.equal(hot, hot.sort().values)
    cold = [i for i in range(VOCAB) if i not in hot.tolist()]
    assert counts[hot].min() >= counts[cold].max()
    assert choose_hot(store, VOCAB, 0) is None


# ---- evaluation ---------------------------------------------------------------------------


def fake_sequence(answer: list[int]) -> Sequence:
    ids = torch.tensor([1, *answer])
    empty = torch.zeros(len(answer), 1)
    return Sequence(ids, torch.zeros(len(ids) - 1, 1), empty.long(), empty, 1, 0.0, 0)


def test_walk_follows_the_rounds_of_a_server() -> None:
    seq = fake_sequence([10, 11, 12, 13, 14, 15, 16])
    # row r drafts after answer token r
    nothing = [0, 0, 0]
    tokens = torch.tensor(
        [[11, 12, 99], nothing, nothing, [99, 15, 16], [15, 16, 0], nothing]
    )
    rounds = walk(tokens, torch.full((6, 3), 0.5), seq)
    # after 10: accepts 11 12, bonus 13; after 13: nothing, bonus 14; after 14: cut by the end
    assert rounds.accepted == [2, 0]
    assert rounds.correct == {1: [True, False, True], 2: [True, True], 3: [False]}
    assert summary(rounds)["tau"] == 2.0


def test_a_perfect_drafter_fills_its_block(target, shards) -> None:
    seq = Store([shards])[0]
    answer = seq.ids[seq.prompt_len :]
    rows = [[int(answer[min(r + k, len(answer) - 1)]) for k in (1, 2, 3)]
            for r in range(len(answer) - 1)]
    rounds = walk(torch.tensor(rows), torch.ones(len(rows), 3), seq)
    assert set(rounds.accepted) == {3}
    assert summary(rounds)["ece"] == 0.0


def test_evaluate_reports_each_kind(target, shards) -> None:
    _, model = target
    store = Store([shards])
    head = Head(model.model.embed_tokens.weight, model.lm_head.weight)
    result = evaluate(random_drafter(model), head, [store[i] for i in range(12)], 4)
    assert set(result["kinds"]) == {0, 1}
    assert 1.0 <= result["mean_tau"] <= 4.0
    json.dumps(result)


def test_calibration_error() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.15, 0.15])
    correct = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert calibration_error(confidence, correct) == pytest.approx((0.45 + 0.15) / 2)


# ---- bytes target -------------------------------------------------------------------------


def test_corpus_keeps_evaluation_prompts_out(tmp_path, monkeypatch) -> None:
    secret = "seven brave otters carried forty small pebbles across the frozen river before noon"
    shared = "please reason step by step and put your final answer within the box now"
    rows = [{"turns": [f"{secret}. {shared}"]}, *({"turns": [shared]} for _ in range(3))]
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    unique = "\n".join(f"line number {i} of a harmless readme about {i * 7}" for i in range(9))
    documents = [
        corpus.Document("prose", "a", unique),
        corpus.Document("prose", "b", unique),  # a copy
        corpus.Document("prose", "c", unique.replace("line", "row") + "\n" + secret),
        corpus.Document("prose", "d", unique.replace("line", "item") + "\nHumanEval results"),
        corpus.Document("prose", "e", unique.replace("line", "step") + "\n" + shared),
    ]
    monkeypatch.setattr(corpus, "file_documents", lambda: iter(documents))
    text = bytes(t for t in corpus.build([], [prompts])["prose", "train"] if t < 256).decode()
    assert text.count("line number 1 ") == 1
    assert "otters" not in text and "HumanEval" not in text
    assert "step number 1 " in text  # instruction wording alone excludes nothing


def test_byte_tokenizer_is_the_identity(tmp_path) -> None:
    from tokenizers import Tokenizer

    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "def f(x):\n\treturn 'é🙂'  # 日本\r\n"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|mask|>").ids == [258]


def test_orthogonalise_flattens_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((2, 24, 40), (2, 40, 24)):
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert singular.min() > 0.5 and singular.max() < 1.5


def test_learning_rate_schedule() -> None:
    assert lr_scale(0.0, 0) == pytest.approx(1 / 50)
    assert lr_scale(0.3, 1000) == 1.0
    assert lr_scale(1.0, 1000) == pytest.approx(0.02)
    assert F.relu(torch.tensor(lr_scale(0.75, 1000))) == pytest.approx(0.51)


def test_help_explains_each_command(capsys) -> None:
    for command in ("generate", "train", "export", "eval"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert "--" in capsys.readouterr().out
