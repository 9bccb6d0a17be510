"""Every test process runs SGLang where it is: on a GPU, or on the CPU runtime."""

import json
from pathlib import Path

import libraspec_sglang

libraspec_sglang.enable_cpu()  # before anything imports sglang; no-op with CUDA

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# No time limit per example: the first one compiles, and machines are busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def prompt_texts() -> list[str]:
    """64 real prompts, mixed over four datasets."""
    lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [rows[16 * dataset + i]["turns"][0] for i in range(16) for dataset in range(4)]
