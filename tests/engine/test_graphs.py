"""Verifications of unequal lengths as CUDA graphs take them, with calls in place of graphs.

SGLang's graph runner, its static buffers and tiers, and FlashInfer's plans are the real ones; see
``libraspec_sglang.cpu.graphs`` for what is not.
"""

import re

import pytest
import torch
from engines import encode, engine, limited

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU's graphs")
TOKENS = 32


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A batch of 4 at most is captured, so that larger ones leave the graphs."""
    logs = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIBRASPEC_CPU_GRAPHS", "1")
        with engine(
            logs,
            "captured",
            options={"policy": "libraspec", "alpha": 4.0, "max_length": 20, "graphs": "ragged"},
            cuda_graph_bs_decode=[1, 2, 4],
            disable_overlap_schedule=False,
            page_size=16,
        ) as process:
            process.log_file = logs / "captured.log"
            yield process


def test_it_says_what_is_captured(captured):
    line = next(x for x in captured.log_file.read_text().splitlines() if "LibraSpec active" in x)
    # 4 requests of 21 rows
    assert re.search(r"rows=ragged in 22 graphs to 84 rows \(tables: \d+ MiB\)", line), line


@pytest.mark.parametrize(("concurrency", "number"), [(1, 8), (4, 24), (8, 24)])
def test_output_is_the_targets_own(captured, prompt_texts, concurrency, number):
    prompts = encode(prompt_texts)[:number]
    _, plain = captured.ask(limited(prompts, [0], TOKENS), concurrency=concurrency, flush=True)
    for lengths in ([20], range(21)):
        for flush in (True, False):
            _, drafted = captured.ask(
                limited(prompts, lengths, TOKENS), concurrency=concurrency, flush=flush
            )
            assert [a["output_ids"] for a in drafted] == [a["output_ids"] for a in plain]
    rounds = sum(a["meta_info"]["spec_verify_ct"] for a in drafted)
    assert rounds < 0.9 * sum(len(a["output_ids"]) - 1 for a in drafted)
