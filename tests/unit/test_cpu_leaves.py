"""The CPU reference of FlashInfer's kernels against float64 loops, through FlashInfer's wrappers.

The oracle below is written from FlashInfer's headers one scalar at a time and shares no code with
``libraspec_sglang.cpu``. On a machine with a GPU the same oracle can check the real kernels.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libraspec_sglang.cpu import attention, batch, enable
from libraspec_sglang.cpu import flashinfer_leaves as leaves

NON_CAUSAL, CAUSAL, CUSTOM = 0, 1, 2


def oracle(q, k, v, scale, mode, window, cap, custom):
    """One request in float64. q: [L, Hq, D]; k, v: [K, Hkv, D]; custom: bool [L][K]."""
    length, heads, _ = q.shape
    keys, kv_heads = k.shape[0], k.shape[1]
    o = torch.zeros(length, heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((length, heads), -math.inf, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for i in range(length):
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = {}
            for j in range(keys):
                if mode == CAUSAL and j > i + keys - length:
                    continue
                if mode == CUSTOM and not custom[i][j]:
                    continue
                if window >= 0 and j + window < i + keys - length:
                    continue
                s = float(q[i, h] @ k[j, g]) * scale
                scores[j] = cap * math.tanh(s / cap) if cap > 0 else s
            if not scores:
                continue
            top = max(scores.values())
            weights = {j: math.exp(s - top) for j, s in scores.items()}
            total = sum(weights.values())
            for j, w in weights.items():
                o[i, h] += w / total * v[j, g]
            lse[i, h] = (top + math.log(total)) * math.log2(math.e)
    return o, lse


def pages_for(kv_lens, page_size, generator):
    """Distinct random pages per request; returns indptr, indices, last_page_len, page count."""
    counts = [-(-n // page_size) for n in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=generator).int()
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor(
        [n - (c - 1) * page_size if c else 0 for n, c in zip(kv_lens, counts, strict=True)],
        dtype=torch.int32,
    )
    return indptr, order[: sum(counts)].clone(), last, sum(counts) + 3


def pack(masks):
    """FlashInfer's packing, by hand: little bit order, each request on whole bytes."""
    data, ptr = [], [0]
    for mask in masks:
        flat = [bit for row in mask for bit in row]
        for at in range(0, len(flat), 8):
            data.append(sum(bit << n for n, bit in enumerate(flat[at : at + 8])))
        ptr.append(len(data))
    return torch.tensor(data, dtype=torch.uint8), torch.tensor(ptr, dtype=torch.int32)


@st.composite
def cases(draw):
    requests = draw(st.integers(1, 4))
    uniform = draw(st.booleans())
    if uniform:
        qo = [draw(st.integers(1, 6))] * requests
    else:
        qo = [draw(st.integers(0, 6)) for _ in range(requests)]
    kv = [draw(st.integers(0, 40)) for _ in range(requests)]
    if draw(st.booleans()):  # verification: the block is part of the keys
        kv = [n + m for n, m in zip(kv, qo, strict=True)]
    return dict(
        qo=qo,
        kv=kv,
        page_size=draw(st.sampled_from([1, 16])),
        heads=draw(st.sampled_from([(1, 1), (4, 2), (6, 1)])),
        mode=draw(st.sampled_from([NON_CAUSAL, CAUSAL, CUSTOM])),
        # the last two are the widest window that hides a key, and the first that does not
        window=draw(st.sampled_from([-1, -1, 0, 3, 50, max(kv) - 2, max(kv) - 1])),
        cap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        want_lse=draw(st.booleans()),
        contiguous=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def check(o, lse, expected, dtype):
    tolerance = dict(atol=2e-5, rtol=1e-4) if dtype == torch.float32 else dict(atol=4e-2, rtol=3e-2)
    want_o = torch.cat([e[0] for e in expected])
    torch.testing.assert_close(o.double(), want_o, **tolerance)
    if lse is not None:
        want_lse = torch.cat([e[1] for e in expected])
        assert torch.equal(lse == -math.inf, want_lse == -math.inf)
        seen = want_lse > -math.inf
        torch.testing.assert_close(lse.double()[seen], want_lse[seen], **tolerance)


def inputs(case):
    generator = torch.Generator().manual_seed(case["seed"])
    q_heads, kv_heads = case["heads"]
    qo, kv, page = case["qo"], case["kv"], case["page_size"]
    indptr, indices, last, n_pages = pages_for(kv, page, generator)
    if case["contiguous"]:
        indices = torch.arange(1, 1 + indices.numel(), dtype=torch.int32)
    cache = torch.randn(2, n_pages, page, kv_heads, 16, generator=generator).to(case["dtype"])
    q = torch.randn(sum(qo), q_heads, 16, generator=generator).to(case["dtype"])
    masks = [
        torch.randint(0, 2, (a, b), generator=generator).tolist()
        for a, b in zip(qo, kv, strict=True)
    ]
    return indptr, indices, last, cache, q, masks


def tokens(cache, indptr, indices, request, length, page):
    rows = [
        (int(p), o) for p in indices[int(indptr[request]) : int(indptr[request + 1])]
        for o in range(page)
    ][:length]  # fmt: skip
    return torch.stack([cache[p, o] for p, o in rows]) if rows else cache[0, :0]


def expected_of(case, cache, indptr, indices, q, masks, scale):
    out, start = [], 0
    for r, (a, b) in enumerate(zip(case["qo"], case["kv"], strict=True)):
        k = tokens(cache[0], indptr, indices, r, b, case["page_size"])
        v = tokens(cache[1], indptr, indices, r, b, case["page_size"])
        out.append(
            oracle(q[start : start + a], k, v, scale, case["mode"], case["window"], case["cap"],
                   masks[r])
        )  # fmt: skip
        start += a
    return out


@pytest.mark.parametrize("padding", ["never", "always", "in part", "chosen"])
@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_paged_run(padding, case):
    indptr, indices, last, cache, q, masks = inputs(case)
    if sum(case["qo"]) == 0:
        return
    plan = batch.BatchPlan(
        [0, *torch.tensor(case["qo"]).cumsum(0).tolist()], list(case["kv"]), case["page_size"]
    )
    if padding != "chosen":
        bs = len(case["kv"])
        together = {"never": [], "always": range(bs), "in part": range(bs - 1, 0, -2)}[padding]
        if not any(case["qo"][r] for r in together) or not any(case["kv"][r] for r in together):
            together = []
        plan._together = lambda *_: sorted(together)
    mask, mask_indptr = pack(masks)
    o = torch.full((*q.shape[:2], 16), 7.0, dtype=q.dtype)
    lse = torch.full(q.shape[:2], 7.0) if case["want_lse"] else None
    for _ in range(2):  # the second layer reuses what the first resolved
        leaves.paged_run(
            None, None, plan, q, cache[0], cache[1], None, indptr, indices, last, o, lse,
            case["mode"], 0, case["window"], False, mask, mask_indptr, None, None, None, None, None,
            None, case["cap"], 0.3, 1.0, 1.0, 0,
        )  # fmt: skip
    check(o, lse, expected_of(case, cache, indptr, indices, q, masks, 0.3), case["dtype"])


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_ragged_run(case):
    case["page_size"] = 1
    indptr, indices, _last, cache, q, masks = inputs(case)
    if sum(case["qo"]) == 0:
        return
    k = cache[0, :, 0][indices.long()]
    v = cache[1, :, 0][indices.long()]
    plan = batch.BatchPlan([0, *torch.tensor(case["qo"]).cumsum(0).tolist()], list(case["kv"]), 1)
    mask, mask_indptr = pack(masks)
    o = torch.full((*q.shape[:2], 16), 7.0, dtype=q.dtype)
    lse = torch.full(q.shape[:2], 7.0) if case["want_lse"] else None
    leaves.ragged_run(
        None, None, plan, q, k, v, None, indptr, o, lse, case["mode"], 0, case["window"], False,
        mask, mask_indptr, None, None, None, None, None, None, case["cap"], 0.3, 1.0, 1.0, 0,
    )  # fmt: skip
    check(o, lse, expected_of(case, cache, indptr, indices, q, masks, 0.3), case["dtype"])


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_decode_run(case):
    case.update(qo=[1] * len(case["kv"]), mode=NON_CAUSAL, kv=[max(1, n) for n in case["kv"]])
    indptr, indices, last, cache, q, masks = inputs(case)
    plan = leaves.plan_decode(None, None, None, indptr, len(case["kv"]), 1, 1, case["page_size"])
    o, lse = torch.empty(*q.shape[:2], 16, dtype=q.dtype), torch.empty(q.shape[:2])
    leaves.decode_run(
        None, None, plan, q, cache[0], cache[1], indptr, indices, last, o, lse, 0, case["window"],
        False, None, case["cap"], 0.3, 1.0, 1.0,
    )  # fmt: skip
    check(o, lse, expected_of(case, cache, indptr, indices, q, masks, 0.3), case["dtype"])


@pytest.mark.parametrize("mode", [NON_CAUSAL, CAUSAL])
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("prefix", [0, 37])
def test_long_prefill_is_blocked(monkeypatch, mode, window, prefix):
    """More queries than one mask block holds give what one block gives."""
    torch.manual_seed(0)
    length = 300
    q = torch.randn(length, 4, 16)
    cache = torch.randn(2, length + prefix, 1, 2, 16)
    results = []
    for block in (64, 4096):
        monkeypatch.setattr(attention, "Q_BLOCK", block)
        plan = batch.BatchPlan([0, length], [length + prefix], 1)
        o, lse = torch.empty(length, 4, 16), torch.empty(length, 4)
        for want in (None, lse):
            plan.run_paged(
                q, cache[0], cache[1], torch.tensor([0, length + prefix]),
                torch.arange(length + prefix), torch.ones(1), mode, window, 0.25, 0.0, o, want,
            )  # fmt: skip
            results.append(o.clone())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("padded", [True, False])
def test_a_request_without_pages_sees_no_key(monkeypatch, padded):
    """FlashInfer's host side says such a request has one token; its kernels know better."""
    from flashinfer.page import get_seq_lens

    together = [0, 1, 2] if padded else []
    monkeypatch.setattr(batch.BatchPlan, "_together", lambda *_: together)
    indptr, last = torch.tensor([0, 0, 0, 2]), torch.ones(3, dtype=torch.int32)
    said = get_seq_lens(indptr, last, 1)
    assert said.tolist() == [1, 1, 2]
    plan = batch.BatchPlan([0, 3, 5, 9], said.tolist(), 1)
    q, cache = torch.randn(9, 4, 8), torch.randn(6, 1, 2, 8)
    o, lse = torch.empty(9, 4, 8), torch.empty(9, 4)
    plan.run_paged(
        q, cache, cache, indptr, torch.tensor([3, 4]), last, NON_CAUSAL, -1, 0.3, 0.0, o, lse
    )
    assert (lse[:5] == -float("inf")).all()
    assert (o[:5] == 0).all()
    assert lse[5:].isfinite().all()


def test_only_what_is_alike_is_padded_together():
    """One long request among short ones stands alone; equal ones share a call."""
    plan = batch.BatchPlan([0, 3, 27, 30, 33], [300, 320, 310, 330], 1)
    assert plan._together(256, 256) == [0, 2, 3]
    plan = batch.BatchPlan([0, 3, 6, 9, 12], [300, 320, 310, 330], 1)
    assert plan._together(256, 256) == [0, 1, 2, 3]
    for kv in ([8000, 100, 100, 100], [100, 100, 100, 8000]):  # decoding beside a long context
        assert len(batch.BatchPlan([0, 1, 2, 3, 4], kv, 1)._together(512, 1024)) == 3
    # the mask of a whole query group is bounded, not only its pattern
    assert not batch.BatchPlan(list(range(0, 3841, 480)), [4096] * 8, 1)._together(128, 448)
    assert batch.BatchPlan([0, 3], [300], 1)._together(256, 256) == []
    assert batch.BatchPlan([0, 0, 0], [5, 5], 1)._together(256, 256) == []
    # long prompts: padding would cost more than the calls it saves
    assert batch.BatchPlan([0, 900, 1700], [900, 800], 1)._together(256, 256) == []


def test_padding_never_reads_a_foreign_row():
    """A NaN outside a request's own rows must not reach it through padding."""
    cache = torch.full((2, 10, 1, 1, 8), math.nan)
    cache[:, 2:7] = 1.0
    plan = batch.BatchPlan([0, 1, 2], [1, 4], 1)
    plan._together = lambda *_: [0, 1]
    o = torch.empty(2, 1, 8)
    plan.run_paged(
        torch.ones(2, 1, 8), cache[0], cache[1], torch.tensor([0, 1, 5]),
        torch.tensor([2, 3, 4, 5, 6]), torch.ones(2), NON_CAUSAL, -1, 1.0, 0.0, o, None,
    )  # fmt: skip
    assert torch.equal(o, torch.ones_like(o))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), split=st.integers(0, 12))
def test_merge_state_equals_attending_at_once(seed, split):
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 2, 8), torch.randn(12, 1, 8), torch.randn(12, 1, 8)
    parts = [oracle(q, k[s], v[s], 0.5, NON_CAUSAL, -1, 0.0, None) for s in
             (slice(0, split), slice(split, 12), slice(0, 12))]  # fmt: skip
    (o_a, s_a), (o_b, s_b), whole = [(o.float(), s.float()) for o, s in parts]
    v_out, s_out = torch.empty_like(o_a), torch.empty_like(s_a)
    leaves.merge_state(o_a, s_a, o_b, s_b, v_out, s_out)
    torch.testing.assert_close(v_out, whole[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(s_out, whole[1], atol=1e-5, rtol=1e-4)


def test_merge_of_two_empty_states():
    v, s = torch.zeros(1, 1, 4), torch.full((1, 1), -math.inf)
    merged, lse = attention.merge_state(v, s, v, s)
    assert torch.equal(merged, v) and torch.equal(lse, s)


@settings(max_examples=50, deadline=None)
@given(lens=st.lists(st.integers(0, 30), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_segment_packbits(lens, seed):
    torch.manual_seed(seed)
    bits = torch.randint(0, 2, (sum(lens),)).bool()
    old = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()])
    rows = [[bits[a:b].int().tolist()] for a, b in pairwise(old)]
    want, new = pack(rows)
    y = torch.empty(int(new[-1]), dtype=torch.uint8)
    leaves.segment_packbits(bits.int(), old, new, "little", y)
    assert torch.equal(y, want)


def test_a_mask_with_too_few_bits_is_refused():
    plan = batch.BatchPlan([0, 4], [9], 1)
    with pytest.raises(ValueError, match="needed"):
        plan.unpack(torch.zeros(2, dtype=torch.uint8), torch.tensor([0, 2]))


@pytest.mark.parametrize("name", ["batch_mla_attention", "single_prefill_with_kv_cache_x",
                                  "batch_prefill_with_kv_cache_posenc_1_x"])  # fmt: skip
def test_a_module_without_a_twin_is_refused_by_name(name):
    spec = type("Spec", (), {"name": name})()
    with pytest.raises(NotImplementedError, match=name):
        leaves.module_for(spec)


WRAPPERS = """
import torch
from libraspec_sglang.cpu import enable
assert enable.enable_cpu()
from libraspec_sglang import patches
patches.apply_all(["cpu_flashinfer_modules", "cpu_flashinfer_float32", "cpu_flashinfer_host"])
import flashinfer
from libraspec_sglang.cpu.flashinfer_leaves import CALLS
torch.manual_seed(0)
ws = torch.empty(1 << 20, dtype=torch.uint8)
q = torch.randn(7, 4, 64)
cache = (torch.randn(64, 1, 2, 64), torch.randn(64, 1, 2, 64))
qo = torch.tensor([0, 3, 7], dtype=torch.int32)
kv = torch.tensor([0, 11, 31], dtype=torch.int32)
idx = torch.randperm(64)[:31].int()
last = torch.ones(2, dtype=torch.int32)
w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(ws, "NHD", backend="fa2")
masks = [torch.ones(3, 11).tril(8).bool(), torch.ones(4, 20).tril(16).bool()]
flat = torch.cat([m.flatten() for m in masks])
def plan(**kw):
    w.plan(qo, kv, idx, last, 4, 2, 64, 1, q_data_type=torch.float32, **kw)
    return w.run(q, cache, return_lse=True)
a, b = plan(causal=True), plan(custom_mask=flat)
# a mask equal to the causal one gives the causal result; LSE too
assert torch.allclose(a[0], b[0], atol=1e-6) and torch.allclose(a[1], b[1], atol=1e-6)
c = plan(causal=False)
assert not torch.allclose(a[0], c[0], atol=1e-3)
flat[flat.numel() - 20] = False
assert not torch.allclose(plan(custom_mask=flat)[0], a[0], atol=1e-6), "one wrong bit goes unseen"
# prefix without a mask + a small masked block, merged, is the whole
pre = flashinfer.BatchPrefillWithPagedKVCacheWrapper(ws, "NHD", backend="fa2")
pre.plan(qo, torch.tensor([0, 8, 24]).int(), torch.cat([idx[:8], idx[11:27]]), last, 4, 2, 64, 1,
         causal=False, q_data_type=torch.float32)
new = torch.cat([idx[8:11], idx[27:31]]).long()
tree = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(ws, "NHD")
tree.plan(qo, qo, 4, 2, 64, causal=True, q_data_type=torch.float32)
o1, s1 = pre.run(q, cache, return_lse=True)
o2, s2 = tree.run(q, cache[0][new, 0], cache[1][new, 0], return_lse=True)
o, s = flashinfer.merge_state(o1, s1, o2, s2)
assert torch.allclose(o, a[0], atol=1e-5) and torch.allclose(s, a[1], atol=1e-5)
d = flashinfer.BatchDecodeWithPagedKVCacheWrapper(ws, "NHD", backend="fa2")
d.plan(kv, idx, last, 4, 2, 64, 1, q_data_type=torch.float32, data_type=torch.float32)
got = d.run(q[[2, 6]].contiguous(), cache)
assert torch.allclose(got, a[0][[2, 6]], atol=1e-6)
assert min(CALLS[n] for n in ("plan", "paged_run", "ragged_run", "decode_run", "merge_state",
                              "packbits", "custom_mask")) > 0, CALLS
print("ok")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime is off beside a GPU")
def test_flashinfers_own_wrappers():
    """FlashInfer's unmodified Python drives the twins; in a process of its own, as it patches."""
    env = {**os.environ, **enable.environment()}
    done = subprocess.run(
        [sys.executable, "-c", WRAPPERS], env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0 and "ok" in done.stdout, done.stderr[-4000:]
