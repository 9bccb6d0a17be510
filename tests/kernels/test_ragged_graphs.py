"""FlashInfer plans of captured tiers: replays in any order give what attention is, to float64."""

import os
import subprocess
import sys

import pytest
import torch

from libraspec_sglang.cpu import enable

REPLAYS = """
import random, sys
from types import SimpleNamespace
import torch
from libraspec_sglang.cpu import enable
assert enable.enable_cpu()
from libraspec_sglang import patches
patches.apply_all(patches.CPU)
from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan
from libraspec_sglang.verify.flashinfer import FlashInferAttnBackend
from libraspec_sglang.verify.layout import ragged_layout, verify_rows
from libraspec_sglang.verify.tiers import tier_of, token_tiers

replays, SLOTS, WIDTH, CONTEXT = map(int, sys.argv[1:])
HEADS, KV_HEADS, DIM, POOL = 2, 1, 64, 4 * CONTEXT
random.seed(0), torch.manual_seed(0)
MODE = SimpleNamespace(is_target_verify=lambda: True)


class Translator:
    # a static pool: request rows hold the slots themselves
    def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out):
        for i, row in enumerate(req_pool_indices.tolist()):
            n, at = int(seq_lens[i]), int(indptr[i])
            out[at : at + n] = SLOT_OF[row, :n]


backend = object.__new__(FlashInferAttnBackend)
backend.workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
backend.prefill_backend, backend.max_context_len = "fa2", CONTEXT + WIDTH
backend.kv_indptr, backend.num_wrappers = [torch.zeros(SLOTS + 1).int()], 1
backend.use_sliding_window_kv_pool = False
backend.skip_prefill, backend.kv_index_translator = False, Translator()
backend.indices_updater_prefill = SimpleNamespace(
    num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
    q_data_type=torch.float32, data_type=torch.float32,
)
backend._tiers, backend._workspace = {}, None
tiers = token_tiers(SLOTS * WIDTH)
backend.init_cuda_graph_state(SLOTS, tiers[-1])
cache = torch.randn(POOL, 1, KV_HEADS, DIM), torch.randn(POOL, 1, KV_HEADS, DIM)
SLOT_OF = torch.zeros(SLOTS, CONTEXT + WIDTH).int()


def batch(layout, slots, requests, prefix):
    spec = SimpleNamespace(ragged_verify_layout=layout, live_seq_lens_cpu=prefix)
    return SimpleNamespace(
        spec_info=spec, forward_mode=MODE, batch_size=slots, kv_loc_plan=None,
        req_pool_indices=torch.tensor(requests + [0] * (slots - len(requests))),
    )


statics = {}
for tier in reversed(tiers):  # capture
    slots = min(tier, SLOTS)
    lens = [tier // slots + (i < tier % slots) for i in range(slots)]
    layout = ragged_layout(verify_rows(lens, max(lens), "cpu"))
    backend.init_forward_metadata_out_graph(batch(layout, slots, list(range(slots)), None), True)
    wrapper = backend.forward_metadata.prefill_wrappers[0]
    assert wrapper.begin_forward.func is fast_prefill_plan
    statics[tier] = wrapper, torch.empty(tier, HEADS, DIM)
assert len({id(w._int_workspace_buffer) for w, _ in statics.values()}) == 1


def truth(q, lens, prefix, requests):
    keys, values = (c[:, 0].double() for c in cache)
    out, row = [], 0
    for n, p, request in zip(lens, prefix, requests):
        at = SLOT_OF[request, : p + n].long()
        k, v = keys[at, 0], values[at, 0]
        scores = torch.einsum("qhd,kd->hqk", q[row : row + n].double(), k) / DIM**0.5
        scores.masked_fill_(torch.ones(n, p + n).triu(p + 1).bool(), float("-inf"))
        out.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1), v))
        row += n
    return torch.cat(out)


worst, used, replayed = 0.0, set(), set()
for turn in range(replays):
    bs = random.randint(1, SLOTS)
    requests = random.sample(range(SLOTS), bs)
    most = random.choice([1, 2, WIDTH])
    lens = [random.randint(1, most) for _ in range(bs)]
    prefix = [random.choice([0, 1, random.randint(0, CONTEXT)]) for _ in range(bs)]
    SLOT_OF.random_(1, POOL)
    if turn % 2:  # a shared prefix
        SLOT_OF[:, : CONTEXT // 2] = SLOT_OF[:1, : CONTEXT // 2]
    rows = verify_rows(lens, WIDTH, "cpu")
    tier = tier_of(rows.total, tiers)
    slots = min(tier, SLOTS)
    backend.init_forward_metadata_out_graph(
        batch(ragged_layout(rows, tier), slots, requests, torch.tensor(prefix).int()))
    wrapper, q = statics[tier]
    assert backend.forward_metadata.prefill_wrappers == [wrapper]
    q.normal_()
    got = wrapper.forward(q, cache, causal=True)
    assert got.shape[0] == tier and bool(got.isfinite().all())
    want = truth(q, lens, prefix, requests)
    worst = max(worst, (got[: rows.total] - want).abs().max().item())
    used |= set(lens)
    replayed.add(tier)
assert worst < 1e-5, worst
assert used == set(range(1, WIDTH + 1)), used
assert replays < 1000 or replayed == set(tiers), replayed
print("ok")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime is off beside a GPU")
@pytest.mark.parametrize(
    ("replays", "slots", "width", "context"), [(10_000, 4, 8, 40), (60, 64, 65, 4096)]
)
def test_replays_across_tiers_in_random_order(replays, slots, width, context):
    """Also: requests without a slot of their own, tiers partly filled, shared prefixes."""
    done = subprocess.run(
        [sys.executable, "-c", REPLAYS, *map(str, (replays, slots, width, context))],
        env={**os.environ, **enable.environment()}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0 and "ok" in done.stdout, done.stderr[-3000:]
