"""A wrong draft checkpoint is named, with the file and the fix, before anything is loaded."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from libraspec_sglang.demo.pairs import HERE
from libraspec_sglang.drafters import checkpoint
from libraspec_sglang.options import OptionError, Options

SOURCE = HERE / "bytes-dflash"
TARGET = json.loads((HERE / "bytes-target" / "config.json").read_text())


@pytest.fixture
def draft(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "draft")
    return tmp_path / "draft"


def edit(draft, **changes):
    file = draft / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        place, name = (
            (config["dflash_config"], key[7:]) if key.startswith("dflash_") else (config, key)
        )
        if value is None:
            place.pop(name, None)
        else:
            place[name] = value
    file.write_text(json.dumps(config))


def test_the_shipped_pairs_pass():
    read = checkpoint.read(str(SOURCE))
    assert read.block_size == 16
    checkpoint.check_against_target(read, TARGET)
    real = checkpoint.read(str(HERE / "smollm2-135m-dflash"))
    assert real.config["hidden_size"] == 576


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "not a DFlash drafter; expected DFlashDraftModel",
        ),
        ({"architectures": None}, "architecture missing"),
        ({"dflash_mask_token_id": None, "dflash_mask_token": None}, "mask_token_id nor mask_token"),
        ({"architectures": "DFlashDraftModelling"}, "not a DFlash drafter"),
        ({"block_size": 1}, "block_size 1 must be"),
        ({"block_size": 100_000}, "block_size 100000 must be"),
        ({"dflash_mask_token_id": "258"}, "mask_token_id '258' must be a token id"),
        ({"dflash_target_layer_ids": [-1, 2]}, "must be a list of layer numbers"),
        ({"dflash_target_layer_ids": "all"}, "must be a list of layer numbers"),
        ({"dflash_target_layer_ids": []}, "must be a list of layer numbers"),
        ({"block_size": None}, "block_size None must be"),
        ({"dflash_projector_type": "domino"}, "projector_type = 'domino'.*algorithm DFLASH"),
    ],
)
def test_unusable_configurations(draft, changes, words):
    edit(draft, **changes)
    with pytest.raises(OptionError, match=words):
        checkpoint.read(str(draft))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 512}, "hidden_size 512 differs from the target's 256"),
        ({"vocab_size": 300}, "vocab_size 300 differs"),
        ({"dflash_mask_token_id": 9999}, "mask_token_id 9999 is outside"),
        ({"dflash_target_layer_ids": [1, 2, 9]}, "deeper target"),
        ({"dflash_target_layer_ids": [1, 2]}, r"fc.weight has shape \[256, 768\].*\[256, 512\]"),
        ({"intermediate_size": 641}, r"mlp.gate_proj.weight has shape \[640, 256\]"),
        ({"num_key_value_heads": 4}, r"self_attn.k_proj.weight has shape \[128, 256\]"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 .* must be positive"),
        ({"head_dim": 63}, "q_proj.weight has shape"),
    ],
)
def test_another_targets_drafter(draft, changes, words):
    edit(draft, **changes)
    with pytest.raises(OptionError, match=words):
        checkpoint.check_against_target(checkpoint.read(str(draft)), TARGET)


@pytest.mark.parametrize("kept", [5000, 300_000])
def test_weights_that_are_cut_off(draft, kept):
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(OptionError, match=r"model\.safetensors: .*cut off; download it again"):
        checkpoint.check_against_target(checkpoint.read(str(draft)), TARGET)


def test_missing_tensors(draft):
    weights = load_file(draft / "model.safetensors")
    name = next(n for n in weights if n.endswith("fc.weight"))
    weights.pop(name)
    save_file(weights, draft / "model.safetensors")
    with pytest.raises(OptionError, match="missing tensors fc; the checkpoint is incomplete"):
        checkpoint.check_against_target(checkpoint.read(str(draft)), TARGET)
    weights[name] = torch.zeros(1)
    weights.pop(next(n for n in weights if "gate_proj" in n))
    save_file(weights, draft / "model.safetensors")
    with pytest.raises(OptionError, match=r"missing tensors layers.0.mlp.gate_proj"):
        checkpoint.check_against_target(checkpoint.read(str(draft)), TARGET)
    (draft / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(OptionError, match="a git-lfs pointer"):
        checkpoint.check_against_target(checkpoint.read(str(draft)), TARGET)
    (draft / "model.safetensors").write_bytes(b"short")
    with pytest.raises(OptionError, match="not a readable safetensors file"):
        checkpoint.check_against_target(checkpoint.read(str(draft)), TARGET)
    (draft / "model.safetensors").unlink()
    with pytest.raises(OptionError, match=r"no \*.safetensors weights"):
        checkpoint.check_against_target(checkpoint.read(str(draft)), TARGET)


def test_paths(tmp_path):
    with pytest.raises(
        OptionError, match="needs a draft model: pass --speculative-draft-model-path"
    ):
        checkpoint.read(None)
    with pytest.raises(OptionError, match="no such directory"):
        checkpoint.read(str(tmp_path / "nowhere"))
    with pytest.raises(OptionError, match=r"no config\.json"):
        checkpoint.read(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(OptionError, match="must be a JSON object"):
        checkpoint.read(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OptionError, match="not valid JSON"):
        checkpoint.read(str(tmp_path))


@pytest.mark.parametrize("size", [1, 17])
def test_block_size_beyond_the_trained_one(size):
    with pytest.raises(OptionError, match=r"--speculative-dflash-block-size .* supports 2 to 16"):
        checkpoint.read(str(SOURCE), block_size=size)


def test_hot_tokens(draft):
    assert checkpoint.read(str(draft)).hot_token_ids is None
    (draft / checkpoint.HOT_TOKENS).write_text("[5, 3, 3]")
    assert checkpoint.read(str(draft)).hot_token_ids == [3, 5]
    (draft / checkpoint.HOT_TOKENS).write_text("[5, 9999]")
    with pytest.raises(OptionError, match="token 9999 is outside the target's vocabulary"):
        checkpoint.check_against_target(checkpoint.read(str(draft)), TARGET)
    (draft / checkpoint.HOT_TOKENS).write_text("[5,")
    with pytest.raises(OptionError, match="not valid JSON"):
        checkpoint.read(str(draft))
    (draft / checkpoint.HOT_TOKENS).write_text("{}")
    with pytest.raises(OptionError, match="non-empty list of token ids"):
        checkpoint.read(str(draft))


def test_length_plans():
    plan = checkpoint.plan_lengths(Options(), 16, host_timed=False)
    assert (plan.policy_name, plan.max_length, plan.window) == ("libraspec", 24, 25)
    assert checkpoint.plan_lengths(Options(), 16, host_timed=True).policy_name == "libra"
    plan = checkpoint.plan_lengths(Options(policy="static"), 8, host_timed=True)
    assert (plan.static_length, plan.window) == (7, 8)
    assert checkpoint.plan_lengths(Options(policy="none"), 8, host_timed=True).window == 2
    # Where whole windows are verified, the default costs no more than DFLASH.
    assert checkpoint.plan_lengths(Options(), 16, host_timed=False, ragged=False).window == 16
    plan = checkpoint.plan_lengths(Options(max_length=3), 16, host_timed=True)
    assert plan.window == 4
    with pytest.raises(OptionError, match="--libraspec-policy libra"):
        checkpoint.plan_lengths(Options(policy="libra"), 16, host_timed=False)


class TestHead:
    def head(self, hot, vocab=10, rows=12):
        from libraspec_sglang.drafters.head import build_head

        lm_head = torch.nn.Linear(4, rows, bias=False)
        torch.nn.init.normal_(lm_head.weight, generator=torch.Generator().manual_seed(0))
        return lm_head, build_head(lm_head, vocab, hot, None)

    def test_whole_vocabulary_without_padding(self):
        lm_head, head = self.head(None)
        hidden = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        tokens, confidence = head(hidden, confidence=True)
        probabilities = (hidden @ lm_head.weight[:10].T).softmax(-1)
        assert torch.equal(tokens, probabilities.argmax(-1))
        assert torch.allclose(confidence, probabilities.max(-1).values, atol=1e-6)

    def test_hot_subset(self):
        lm_head, head = self.head([2, 3, 7, 11])  # 11 is padding beyond the vocabulary
        hidden = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
        tokens, confidence = head(hidden, confidence=True)
        assert set(tokens.tolist()) <= {2, 3, 7}
        part = (hidden @ lm_head.weight[[2, 3, 7]].T).softmax(-1)
        assert torch.allclose(confidence, part.max(-1).values, atol=1e-6)

    def test_confidence_only_when_asked(self):
        _, head = self.head(None)
        assert head(torch.zeros(1, 4), confidence=False)[1] is None

    def test_a_head_without_weights_is_refused(self):
        from libraspec_sglang.drafters.head import build_head

        class Packed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), False)

        with pytest.raises(ValueError, match="neither a dense weight nor"):
            build_head(Packed(), 4, None, None)


REFUSALS = """
import sys, json
import libraspec_sglang; libraspec_sglang.enable_cpu()
from sglang.srt.plugins import load_plugins; load_plugins()
from sglang.srt.server_args import ServerArgs
from libraspec_sglang.demo.pairs import HERE
from libraspec_sglang.options import OptionError
base = dict(model_path=str(HERE / "bytes-target"), speculative_algorithm="LIBRASPEC",
            speculative_draft_model_path=str(HERE / "bytes-dflash"))
for given in json.loads(sys.argv[1]):
    options = {k: given.pop(k) for k in ("trace", "cost") if k in given}
    libraspec_sglang.configure(trace=options.get("trace"), cost=options.get("cost"))
    try:
        ServerArgs(**base, **given).resolve_once()
        print("accepted")
    except OptionError as error:
        print(error)
"""


def test_refusals_through_sglangs_own_resolution(tmp_path):
    """SGLang hands validation a view of the arguments, so only its own path proves a refusal."""
    import subprocess
    import sys

    hybrid = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    cases = [
        ({}, "accepted"),
        ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size (64)"),
        ({"enable_lora": True}, "--enable-lora (True)"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk (True)"),
        ({"attention_backend": "torch_native"}, "--attention-backend torch_native cannot verify"),
        ({"trace": "/nowhere/t.jsonl"}, "--libraspec-trace /nowhere/t.jsonl: No such file or dir"),
        ({"cost": "/nowhere/c.yaml"}, "--libraspec-cost: /nowhere/c.yaml: No such file or dir"),
        ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}, "--enable-dp-attention"),
        (
            {"model_path": str(tmp_path), "disable_radix_cache": True},
            "qwen3_next has Mamba or linear-attention layers",
        ),
        (
            {"speculative_num_draft_tokens": 40},
            "num-draft-tokens) 40: this checkpoint supports 2 to",
        ),
        ({"speculative_draft_model_path": str(HERE / "bytes-target")}, "not a DFlash drafter"),
    ]
    given = [g for g, _ in cases[:-1]]
    code = REFUSALS.replace("**base, **given", "**{**base, **given}")
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([*given, cases[-1][0]])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [s for s in done.stdout.splitlines() if s]
    for (arguments, words), line in zip(cases, lines[-len(cases) :], strict=True):
        assert words in line, (arguments, line)
