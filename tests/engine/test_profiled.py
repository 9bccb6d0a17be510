"""`libraspec profile` on a real engine, and servers that decide by what it wrote."""

import json

import pytest
from engines import encode, engine

from libraspec_sglang import cli
from libraspec_sglang.controller import cost_file
from libraspec_sglang.demo.runner import RunnerError


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def profile(logs):
    out = logs / "cost.yaml"
    words = ["profile", "--pair", "test", "--out", str(out), "--batches", "1,2"]
    assert cli.main([*words, "--max-length", "7", "--contexts", "64,256"]) == 0
    return out


def test_a_profile_says_what_it_measured(profile):
    cost = cost_file.read(profile)
    assert cost.measured
    assert "Qwen3ForCausalLM" in cost.target and "float32" in cost.target
    assert "DFlashDraftModel" in cost.drafter
    rows = {point[1] for point in cost.profile.verify if point[0] == 2}
    assert rows >= {2, 4, 8, 16}
    assert {point[0] for point in cost.profile.draft} == {1, 2}
    assert 0 < cost(1, 1, 100) <= cost(1, 8, 100) < 1.0
    assert cost.elsewhere > 0


def test_a_server_decides_by_it(profile, logs, prompt_texts):
    prompts, trace = encode(prompt_texts)[:4], logs / "trace.jsonl"
    options = {"cost": profile, "trace": trace}
    with engine(logs, "priced", options=options) as process:
        outputs = process.generate(prompts, max_new_tokens=32, concurrency=2).outputs
        plainly = {"temperature": 0, "max_new_tokens": 32,
                   "custom_params": {"libraspec_max_length": 0}}  # fmt: skip
        _, answers = process.ask(
            [{"input_ids": p, "sampling_params": plainly} for p in prompts], concurrency=2
        )
    assert [a["output_ids"] for a in answers] == outputs
    assert f"cost={profile}, refined by its rounds" in (logs / "priced.log").read_text()
    header = json.loads(trace.read_text().splitlines()[0])
    assert cost_file.read(profile).target == header["target"]


def test_another_models_profile_is_refused_with_the_way_out(profile, logs):
    other = logs / "other.yaml"
    cost = cost_file.read(profile)
    cost_file.write(cost.model_copy(update={"target": "another"}), other)
    with (
        pytest.raises(RunnerError, match=r"other\.yaml: made for the target 'another'.*unchecked"),
        engine(logs, "refused", options={"cost": other}),
    ):
        pass
