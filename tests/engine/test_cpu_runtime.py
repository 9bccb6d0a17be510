"""SGLang itself on CPU: its FlashInfer backend and built-in DFLASH against torch_native.

Engines take tens of seconds to start, so each serves several purposes, and two start at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import libraspec_sglang
from libraspec_sglang.cpu import enable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime is off here")

DEMO = Path(libraspec_sglang.__file__).parent / "demo"
TARGET, DRAFT = DEMO / "bytes-target", DEMO / "bytes-dflash"
RUNNER = Path(__file__).parent / "cpu_engine.py"

TEXT = "The library stood at the end of the street, and nobody had opened its door for years. "
BATCHES = [
    ["def add(a, b):\n    return"],
    ["Once upon a time", "1, 2, 3, 4, 5,", TEXT * 2, "The capital of France is"],
    [TEXT * 4 + "Then", TEXT * 4 + "But"],  # shares a prefix: served from the radix cache
]
EXACT = {"model_path": str(TARGET), "dtype": "float32"}
DFLASH = {
    **EXACT,
    "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": str(DRAFT),
}
SERVERS = {
    "torch_native": {**EXACT, "attention_backend": "torch_native"},
    "flashinfer": {**EXACT, "chunked_prefill_size": 96, "page_size": 16},
    "dflash": {**DFLASH, "disable_overlap_schedule": False, "chunked_prefill_size": 96},
}


def environment() -> dict[str, str]:
    return {**os.environ, **enable.environment(), "HF_HUB_OFFLINE": "1"}


def run_engine(name: str) -> dict:
    job = {"server": SERVERS[name], "batches": BATCHES, "tokens": 48}
    done = subprocess.run(
        [sys.executable, str(RUNNER), json.dumps(job)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SERVERS, pool.map(run_engine, SERVERS), strict=True))


def test_defaults_are_cpu_and_flashinfer(results):
    for name, result in results.items():
        assert result["device"] == "cpu"
        want = "torch_native" if name == "torch_native" else "flashinfer"
        assert result["attention_backend"] == want


@pytest.mark.parametrize("name", [n for n in SERVERS if n != "torch_native"])
def test_tokens_equal_torch_native(results, name):
    for got, want in zip(results[name]["tokens"], results["torch_native"]["tokens"], strict=True):
        assert got == want
    assert all(len(tokens) == 48 for batch in results[name]["tokens"] for tokens in batch)


@pytest.mark.parametrize(
    ("name", "ran"),
    [
        ("flashinfer", {"plan", "decode_run", "ragged_run", "paged_run", "merge_state"}),
        ("dflash", {"plan", "paged_run", "ragged_run", "merge_state"}),
    ],
)
def test_the_reference_really_ran(results, name, ran):
    calls = results[name]["calls"]
    assert ran <= set(calls), calls
    assert results["torch_native"]["calls"] == {}


def test_drafts_are_accepted(results):
    lengths = [x for batch in results["dflash"]["accept"] for x in batch]
    assert max(lengths) > 1.5, lengths


@pytest.mark.parametrize("name", list(SERVERS))
def test_the_radix_cache_serves(results, name):
    # the last batch repeats text an earlier batch prefilled
    assert max(results[name]["cached"][2]) > 16


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_launch_server_in_bfloat16():
    """The command line of the README, with the model's own dtype and no backend named."""
    port = free_port()
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET),
        "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFT),
        "--port", str(port), "--max-total-tokens", "8192", "--log-level", "error",
    ]  # fmt: skip
    server = subprocess.Popen(
        command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None, server.stderr.read()[-6000:]
            assert time.monotonic() < deadline, "the server did not come up"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        body = {
            "text": TEXT,
            "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        reply = json.load(urllib.request.urlopen(request, timeout=60))
        assert reply["meta_info"]["completion_tokens"] == 40
        assert reply["meta_info"]["spec_accept_length"] >= 1
        info = json.load(urllib.request.urlopen(f"{url}/server_info", timeout=30))
        assert info["attention_backend"] == "flashinfer"
        assert info["internal_states"][0]["libraspec_cpu_calls"]["paged_run"] > 0
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        server.stderr.close()
