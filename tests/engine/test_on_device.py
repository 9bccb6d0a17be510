"""The worker as it runs on a device: kernels draft and decide, outcomes come a round late.

Triton's interpreter stands in for the device, so the code path is the real one.
"""

import json

import pytest
from engines import encode, engine


# Interpreted, a draft is so dear that libra, which measures it, only tries one now and then.
@pytest.mark.parametrize(("policy", "lengths", "tau"), [("libra", 2, 1.0), ("libraspec", 4, 1.3)])
def test_output_is_the_targets_own(policy, lengths, tau, tmp_path, prompt_texts, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    prompts, trace = encode(prompt_texts)[:2], tmp_path / "trace.jsonl"
    sampling = {"temperature": 0, "max_new_tokens": 24}
    plainly = {**sampling, "custom_params": {"libraspec_max_length": 0}}
    with engine(
        tmp_path,
        policy,
        options={"policy": policy, "trace": trace},
        disable_overlap_schedule=False,
    ) as process:
        answers = {}
        for name, params in (("plain", plainly), ("drafted", sampling)):
            requests = [{"input_ids": p, "sampling_params": params} for p in prompts]
            answers[name] = process.ask(requests, concurrency=2, flush=True)[1]
    assert [a["output_ids"] for a in answers["drafted"]] == [
        a["output_ids"] for a in answers["plain"]
    ]
    assert "controller=kernels" in (tmp_path / f"{policy}.log").read_text()
    rounds = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    verified = [rows for r in rounds for rows in r["verified"]]
    gained = [tokens for r in rounds for tokens in r["gained"]]
    assert len(set(verified)) >= lengths
    assert sum(gained) > tau * len(gained)
