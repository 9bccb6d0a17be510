"""When the CPU runtime switches on, what it sets, and that its patches come off again."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from libraspec_sglang import patches
from libraspec_sglang.cpu import enable, install

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime is off here")


def run(code: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """A fresh interpreter: these tests are about imports, which one process does once."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **(enable.environment() if env is None else env)},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LIBRASPEC_CPU", raising=False)


def test_beside_a_gpu_nothing_happens(gpu, monkeypatch):
    before = (dict(os.environ), list(sys.path))
    assert not enable.wanted()
    assert enable.environment() == {}
    assert enable.enable_cpu() is False
    assert install.install() == []
    assert (dict(os.environ), list(sys.path)) == before


def test_an_explicit_choice_wins(gpu, monkeypatch):
    monkeypatch.setenv("LIBRASPEC_CPU", "1")
    assert enable.wanted()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LIBRASPEC_CPU", "0")
    assert not enable.wanted() and enable.environment() == {}
    monkeypatch.setenv("LIBRASPEC_CPU", "yes")
    with pytest.raises(ValueError, match="LIBRASPEC_CPU"):
        enable.wanted()


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("LIBRASPEC_CPU", "OMP_NUM_THREADS", "PYTHONPATH", "FLASHINFER_WORKSPACE_BASE",
                 "FLASHINFER_CUDA_ARCH_LIST", "SGLANG_USE_CPU_ENGINE"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_environment(no_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/mine", str(enable.SHIM)]))
    env = enable.environment()
    assert env["PYTHONPATH"].split(os.pathsep) == [str(enable.SHIM), "/mine"]
    assert env["LIBRASPEC_CPU"] == env["SGLANG_USE_CPU_ENGINE"] == env["OMP_NUM_THREADS"] == "1"
    assert Path(env["FLASHINFER_WORKSPACE_BASE"]).is_relative_to(tmp_path)
    assert "HF_HUB_OFFLINE" not in env
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert enable.environment()["OMP_NUM_THREADS"] == "3"


def test_enable_is_idempotent(no_gpu, monkeypatch):
    for name in enable.environment():  # what enable_cpu() sets must not outlive the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert enable.enable_cpu()
    once = (dict(os.environ), list(sys.path))
    assert sys.path[0] == str(enable.SHIM)
    assert enable.active()
    assert enable.enable_cpu()
    assert (dict(os.environ), list(sys.path)) == once


def test_a_real_sgl_kernel_already_loaded_is_an_error(no_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", type(sys)("sgl_kernel"))
    with pytest.raises(RuntimeError, match="before importing sglang"):
        enable.enable_cpu()


def test_an_unwritable_cache_falls_back(no_gpu, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    base = Path(enable.environment()["FLASHINFER_WORKSPACE_BASE"])
    base.mkdir(parents=True, exist_ok=True)
    assert os.access(base, os.W_OK) and not base.is_relative_to(blocked)


@needs_no_gpu
def test_stand_in():
    done = run("""
import sgl_kernel
from sgl_kernel import silu_and_mul            # importable ...
try:
    silu_and_mul(1)                            # ... but not callable
    raise SystemExit("no error")
except NotImplementedError as e:
    assert "sgl_kernel.silu_and_mul" in str(e), e
for name in ("sgl_kernel.scalar_type", "sgl_kernel.speculative"):
    try:
        __import__(name)
        raise SystemExit(name)
    except ImportError:
        pass
assert not hasattr(sgl_kernel, "__version__")
""")
    assert done.returncode == 0, done.stderr


def shim():
    spec = importlib.util.spec_from_file_location(
        "sgl_kernel_stand_in", enable.SHIM / "sgl_kernel" / "__init__.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stand_in_slot_tables():
    k = shim()
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    pool, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 7])
    out = torch.empty(5, dtype=torch.int64)
    k.assign_extend_cache_locs_cpu(pool, table, start, end, out, 10)
    assert out.tolist() == [21, 22, 4, 5, 6]
    k.assign_req_to_token_pool_cpu(pool, table, start, end, out + 100, 10)
    assert table[2, 1:3].tolist() == [121, 122] and table[0, 4:7].tolist() == [104, 105, 106]
    draft = torch.empty(4, dtype=torch.int64)
    k.assign_draft_cache_locs_contiguous_cpu(pool, table, torch.tensor([5, 1]), draft, 10, 1, 2)
    assert draft.tolist() == [25, 26, 1, 2]


def test_stand_in_moves_kv_rows_even_where_they_overlap():
    k = shim()
    layers = [torch.arange(24.0).view(6, 4), torch.arange(12.0).view(6, 2)]
    want = [layer.clone() for layer in layers]
    for layer in want:
        layer[[1, 2, 3]] = layer[[2, 3, 5]].clone()
    k.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers]),
        torch.tensor([16, 8]),
        torch.tensor([1, 2, 3]),
        torch.tensor([2, 3, 5]),
    )
    assert all(torch.equal(a, b) for a, b in zip(layers, want, strict=True))


def test_stand_in_acceptance_helpers():
    k = shim()
    bonus = torch.empty(2, dtype=torch.int64)
    k.fill_bonus_tokens_cpu(torch.arange(8), torch.tensor([1, 4]), bonus, 4)
    assert bonus.tolist() == [0, 7]
    kept = torch.full((4,), -9)
    k.fill_accept_out_cache_loc_cpu(torch.tensor([[0, -1], [2, 3]]), torch.arange(10, 14), kept)
    assert kept.tolist() == [10, 12, 13, -9]
    ids = torch.tensor([1, 2, 3, 4, 5])
    k.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([8, 9]))
    assert ids.tolist() == [2, 3, 8, 5, 9]


@pytest.mark.parametrize("whole", [True, False])
def test_stand_in_tree_build_and_walk(whole):
    """Root with children a, b; a has a child c. The target says: b, then stop."""
    k, n, seq = shim(), 4, 3
    chosen = torch.tensor([[0, 1, 2]])  # ids of a, b, c; topk 2: c is in block 1 = child of id 0
    parents = torch.tensor([[-1, 0, 1]])
    mask = torch.ones(n * (seq + n) if whole else n * n, dtype=torch.bool)
    positions = torch.zeros(n, dtype=torch.int64)
    index, nxt, sib = (torch.full((1, n), -1) for _ in range(3))
    k.build_tree_kernel_efficient_cpu(
        parents, chosen, torch.tensor([seq]), mask, positions, index, nxt, sib, 2, 3, n,
        0 if whole else 1,
    )  # fmt: skip
    assert positions.tolist() == [3, 4, 4, 5]
    assert nxt.tolist() == [[1, 3, -1, -1]] and sib.tolist() == [[-1, 2, -1, -1]]
    tree = mask.view(n, -1)[:, -n:].int().tolist()
    assert tree == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert not whole or bool(mask.view(n, -1)[:, :seq].all())
    candidates = torch.tensor([[50, 60, 70, 80]])
    predicts, accept, count = torch.zeros(n).long(), torch.full((1, 4), -1), torch.zeros(1).long()
    target = torch.tensor([[70, 0, 90, 0]])
    k.verify_tree_greedy_cpu(predicts, accept, count, candidates, index, nxt, sib, target)
    assert count.tolist() == [1] and accept.tolist() == [[0, 2, -1, -1]]
    assert predicts[0] == 70 and predicts[2] == 90


def test_every_patch_has_a_reason_and_both_ways():
    found = {p.stem for p in Path(patches.__file__).parent.glob("cpu_*.py")}
    assert found == set(patches.CPU)
    for name in patches.CPU:
        module = importlib.import_module(f"libraspec_sglang.patches.{name}")
        assert callable(module.apply) and callable(module.undo)
        for section in ("Why:", "Where:", "Undo:"):
            assert section in module.__doc__, (name, section)


UNDO = """
import torch
from libraspec_sglang.cpu import enable
assert enable.active()
import flashinfer.decode, flashinfer.prefill, flashinfer.utils
from flashinfer.jit import core, utils
from sglang.srt.mem_cache import kv_index_translator
import sglang.srt.utils
import sglang.srt.layers.attention.flashinfer_backend as backend
def state():
    return [torch.Tensor.record_stream, core.JitSpec.build_and_load, dict(utils.dtype_map),
            dict(utils.dtype_map_kv), dict(utils.filename_safe_dtype_map), flashinfer.prefill.torch,
            flashinfer.decode.torch, flashinfer.utils.get_compute_capability, backend.torch,
            kv_index_translator.create_flashinfer_kv_indices_triton,
            sglang.srt.utils.is_flashinfer_available, backend.is_flashinfer_available]
from libraspec_sglang import patches
before = state()
old_class = backend.FlashInferAttnBackend
for _ in range(2):
    for _ in range(2):                                   # applying twice is applying once
        assert patches.apply_all(patches.CPU) == list(patches.CPU)
    changed = state()
    assert all(a is not b or isinstance(a, dict) for a, b in zip(before[:-2], changed)), changed
    patches.undo_all(patches.CPU)
    assert state() == before
assert hasattr(backend, "fast_decode_plan")
torch.zeros(2).new_zeros(1)
from sglang.srt.plugins.hook_registry import HookRegistry
import sglang.srt.mem_cache.allocation as allocation
calls = []
allocation.get_last_loc_triton = lambda *a: calls.append(a)
HookRegistry.apply_hooks()
args = (torch.arange(6).view(2, 3), torch.tensor([1]), torch.tensor([2]))
allocation.get_last_loc_triton(*args)
assert len(calls) == 1, "an undone hook must pass through"
patches.apply_all(["cpu_last_loc"])
assert allocation.get_last_loc_triton(*args).tolist() == [4] and len(calls) == 1
print("ok")
"""


@needs_no_gpu
def test_undo_restores():
    done = run(UNDO)
    assert done.returncode == 0 and "ok" in done.stdout, done.stderr[-4000:]


@needs_no_gpu
def test_kv_indices_twin():
    from libraspec_sglang.patches.cpu_kv_indices import create_kv_indices

    ids = torch.arange(60).view(3, 20)
    lens, indptr = torch.tensor([4, 0, 2]), torch.tensor([0, 4, 4, 6])
    out = torch.full((8,), -7, dtype=torch.int32)
    create_kv_indices(ids, torch.tensor([2, 1, 0]), lens, indptr, None, out, 20)
    assert out.tolist() == [40, 41, 42, 43, 0, 1, -7, -7]
    create_kv_indices(ids, torch.tensor([2, 1, 0]), lens, indptr, torch.tensor([3, 0, 15]), out, 20)
    assert out.tolist() == [43, 44, 45, 46, 15, 16, -7, -7]
    pages = torch.tensor([[7, 9]])
    create_kv_indices(
        pages, torch.tensor([0]), torch.tensor([4]), torch.tensor([0, 4]), torch.tensor([2]), out,
        2, ENTRY_PAGE_SIZE=4,
    )  # fmt: skip
    assert out[:4].tolist() == [30, 31, 36, 37]
    mapping = torch.arange(100) * 10
    create_kv_indices(
        ids, torch.tensor([0]), torch.tensor([2]), torch.tensor([0, 2]), None, out, 20,
        token_mapping=mapping,
    )  # fmt: skip
    assert out[:2].tolist() == [0, 10]


def test_seeded_hash_is_murmur3():
    """Against a byte-wise MurmurHash3 written out from its definition."""
    code = """
import struct, torch
import libraspec_sglang; libraspec_sglang.enable_cpu()
import sgl_kernel

def murmur3(data):
    h, mask = 0, 0xFFFFFFFF
    rotate = lambda x, r: ((x << r) | (x >> (32 - r))) & mask
    for (k,) in struct.iter_unpack("<I", data):
        k = rotate(k * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
        h = (rotate(h ^ k, 13) * 5 + 0xE6546B64) & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16

seeds, positions, columns = [0, 7, 2**63 + 12345], [0, 5, 4_000], [0, 1, 151_000]
got = torch.ops.sgl_kernel.murmur_hash32_cpu(
    torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
)
want = [[murmur3(struct.pack("<QII", s, p, c)) for c in columns]
        for s, p in zip(seeds, positions)]
assert got.dtype == torch.uint32 and got.tolist() == want, (got.tolist(), want)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
