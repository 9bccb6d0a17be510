"""The real HTTP server under real clients, started as users start it: ``libraspec serve``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests
from servers import PLAIN, PROMPT, Server, serving

from libraspec_sglang.cpu import enable


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ("--enable-metrics", "--libraspec-max-length", "20", "--decode-log-interval", "8")
    with serving(log, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)


def test_it_says_what_is_active(server):
    log = server.log.read_text()
    line = next(line for line in log.splitlines() if "LibraSpec active" in line)
    assert "policy=libra" in line
    assert "max_length=20" in line  # the flag arrived in the scheduler process
    assert "rows=ragged" in line


def test_generate_and_meta_info(server):
    ours = server.generate().json()
    plain = server.generate(custom_params=PLAIN).json()
    assert ours["text"] == plain["text"]
    meta = ours["meta_info"]
    assert meta["completion_tokens"] == 40
    assert meta["spec_accept_length"] > 1.3
    assert meta["spec_cap_length"] > 1
    assert meta["spec_verify_ct"] == sum(meta["spec_correct_drafts_histogram"])
    assert plain["meta_info"]["spec_verify_ct"] == 39


def test_openai_completions_streaming_and_not(client):
    asked = {"model": "default", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stream = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole
    assert len(whole) > 10


def test_openai_chat_streaming_and_not(client):
    asked = {
        "model": "default", "max_tokens": 30, "temperature": 0,
        "messages": [{"role": "user", "content": "Write a function."}],
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    parts = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(parts) == whole
    assert len(parts) > 1


def test_features_equal_plain_decoding(server):
    """Stop strings, bias, penalties, minimum length and grammars, each against plain decoding."""
    for sampling in (
        {"stop": ["return", "self"]},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.6, "presence_penalty": 0.2},
        {"min_new_tokens": 12, "stop_token_ids": [10, 32]},
        {"logit_bias": {"32": -3.0}},
        {"regex": r"[a-z]{3,8} = \d{2,9};", "max_new_tokens": 24},
    ):
        ours = server.generate(**sampling).json()
        plain = server.generate(**sampling, custom_params=PLAIN).json()
        assert ours["text"] == plain["text"], sampling
    assert re.match(r"[a-z]{3,8} = \d{2,9};?", ours["text"])


def test_n_and_logprobs(client):
    answer = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=12, temperature=0.8, n=3, logprobs=2
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert len(choice.logprobs.token_logprobs) == 12
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_metrics(server):
    for text in (PROMPT, "class Stack:\n    ", "The library stood at the end of the "):
        server.generate(text, max_new_tokens=120, ignore_eos=True)
    time.sleep(1.5)
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    values = dict(re.findall(r"^(sglang:\w+)\{[^}]*\} ([\d.e+-]+)$", text, re.M))
    assert float(values["sglang:spec_accept_length"]) > 1
    assert float(values["sglang:spec_cap_length"]) > 1


def test_bad_requests_are_refused_and_the_server_goes_on(server):
    answer = server.generate(custom_params={"libraspec_max_length": -4})
    assert answer.status_code == 400
    assert "custom_params['libraspec_max_length']" in answer.text
    answer = server.generate(custom_params={"libraspec_typo": 1})
    assert "libraspec_typo" in answer.text and "libraspec_max_length" in answer.text
    assert server.generate(text="x" * 5000).status_code == 400
    assert server.generate().status_code == 200


def test_clients_that_leave_mid_stream(server):
    def leave(i: int) -> None:
        body = {"text": PROMPT * (1 + i % 3), "stream": True,
                "sampling_params": {"max_new_tokens": 800, "ignore_eos": True}}  # fmt: skip
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as answer:
            for _ in zip(range(2), answer.iter_lines(), strict=False):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(12)))
    ours, plain = server.generate().json(), server.generate(custom_params=PLAIN).json()
    assert ours["text"] == plain["text"]


def test_bench_serving(server, tmp_path):
    """SGLang's own load generator, with a dataset that needs no download."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang",
         "--base-url", server.url, "--dataset-name", "random-ids", "--random-input-len", "48",
         "--random-output-len", "24", "--num-prompts", "12", "--max-concurrency", "4",
         "--output-file", str(tmp_path / "out.jsonl")],
        env={**os.environ, **enable.environment(), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
    assert result["completed"] == 12
    assert result["output_throughput"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--libraspec-alpha", "0"], "--libraspec-alpha (or LIBRASPEC_ALPHA) = '0'"),
        (["--speculative-draft-model-path", "/nowhere"], "/nowhere: no such directory"),
    ],
)
def test_bad_start_options_end_with_one_message(tmp_path, flags, words):
    server = Server(tmp_path / "log", *flags)
    try:
        assert server.process.wait(timeout=200) != 0
        assert words in server.log.read_text()
    finally:
        server.stop()
