"""The training scripts on tiny random models: resumption, loss, evaluation, corpus."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import MASK, VOCAB, answers, random_drafter, shards, target
from training import cli, corpus, train
from training.byte_tokenizer import save_tokenizer
from training.evaluate import Head, calibration_error, evaluate, summary, walk
from training.hot import choose_hot
from training.optim import lr_scale, orthogonalise
from training.store import Sequence, Store

__all__ = ["answers", "shards", "target"]  # fixtures

# ---- training -----------------------------------------------------------------------------


def train_args(target: Path, data: Path, out: Path, *extra: str) -> argparse.Namespace:
    return cli.parser().parse_args(
        [
            "train",
            "--target",
            str(target),
            "--data",
            str(data),
            "--out",
            str(out),
            "--layers",
            "0",
            "1",
            "--mask-token-id",
            str(MASK),
            "--block-size",
            "4",
            "--train-block",
            "6",
            "--steps",
            "8",
            "--batch",
            "2",
            "--anchors",
            "8",
            "--eval-every",
            "100",
            "--held-out-every",
            "6",
            "--noise",
            "0.1",
            *extra,
        ]
    )


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
    tokens = torch.tensor([[11, 12, 99], nothing, nothing, [99, 15, 16], [15, 16, 0], nothing])
    rounds = walk(tokens, torch.full((6, 3), 0.5), seq)
    # after 10: accepts 11 12, bonus 13; after 13: nothing, bonus 14; after 14: cut by the end
    assert rounds.accepted == [2, 0]
    assert rounds.correct == {1: [True, False, True], 2: [True, True], 3: [False]}
    assert summary(rounds)["tau"] == 2.0


def test_a_perfect_drafter_fills_its_block(target, shards) -> None:
    seq = Store([shards])[0]
    answer = seq.ids[seq.prompt_len :]
    rows = [
        [int(answer[min(r + k, len(answer) - 1)]) for k in (1, 2, 3)]
        for r in range(len(answer) - 1)
    ]
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
    assert lr_scale(0.75, 1000) == pytest.approx(0.51)


def test_help_explains_each_command(capsys) -> None:
    for command in ("generate", "train", "export", "eval"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert "--" in capsys.readouterr().out
