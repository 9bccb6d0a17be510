"""Acceptance on the device against the rule, one request at a time.

Run with the torch twin on CPU and the Triton kernel on CUDA; repeated here with the kernel on CPU.
"""

import pytest
import torch
from compiled import SHARED_KIB, check_compiled, rerun_interpreted
from hypothesis import given, settings
from hypothesis import strategies as st

from libraspec_sglang.kernels import accept as module
from libraspec_sglang.kernels import accept_triton as kernels
from libraspec_sglang.kernels.accept import accept
from libraspec_sglang.kernels.length_controller import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
few = settings(max_examples=25 if INTERPRETED else 200, derandomize=True, deadline=None)
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="needs compiled kernels")


@not_interpreted
def test_the_kernel_under_the_interpreter():
    assert rerun_interpreted(__file__) >= 6


def test_the_kernel_runs_where_it_should(monkeypatch):
    if DEVICE == "cpu" and not INTERPRETED:
        pytest.skip("the twin's path")
    monkeypatch.setattr(module, "_twin", None)
    assert run([[5, 6]], [[5]])[1].tolist() == [2]


def run(target, drafted, width=None, limits=None):
    lens = torch.tensor([len(row) for row in target], dtype=torch.int32)
    return [
        result.cpu()
        for result in accept(
            torch.tensor([t for row in target for t in row]).to(DEVICE),
            torch.tensor(drafted, dtype=torch.int64).view(len(target), -1).to(DEVICE),
            lens.to(DEVICE),
            int(lens.max()) if width is None else width,
            None if limits is None else torch.tensor(limits).to(DEVICE),
        )
    ]


def by_loop(row, draft, limit):
    """The tokens a request gains."""
    gained = []
    for depth, token in enumerate(row):
        gained.append(token)
        if depth >= min(len(row) - 1, limit) or draft[depth] != token:
            break
    return gained


@few
@given(st.data())
def test_it_is_the_rule(data):
    bs, depth = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 12))
    token = st.integers(0, 2)  # few values, so that long agreements and early misses both occur
    drafted = data.draw(st.lists(st.lists(token, min_size=depth, max_size=depth),
                                 min_size=bs, max_size=bs))  # fmt: skip
    target = [data.draw(st.lists(token, min_size=1, max_size=depth + 1)) for _ in range(bs)]
    limits = data.draw(st.none() | st.lists(st.integers(0, 14), min_size=bs, max_size=bs))
    width = max(map(len, target)) + data.draw(st.integers(0, 5))
    tokens, gained, bonus = run(target, drafted, width, limits)
    for r, (row, draft) in enumerate(zip(target, drafted, strict=True)):
        wanted = by_loop(row, draft, depth if limits is None else limits[r])
        assert gained[r] == len(wanted)
        assert bonus[r] == wanted[-1]
        assert tokens[r].tolist() == row + [-1] * (width - len(row))


@pytest.mark.parametrize("rows", [1, 2, 3, 24, 25, 65])
def test_every_acceptance_of_every_length(rows):
    target, drafted = [], []
    for hits in range(rows):
        draft = list(range(10, 10 + rows - 1))
        target.append([*draft[:hits], 99, *[0] * (rows - hits - 1)])
        drafted.append(draft)
    _, gained, bonus = run(target, drafted)
    assert gained.tolist() == list(range(1, rows + 1))
    assert bonus.tolist() == [99] * rows


def test_a_large_ragged_batch():
    sizes = [1 + (7 * r) % 25 for r in range(1100)]  # more than the kernel sums at once
    target = [[(r + k) % 5 for k in range(n)] for r, n in enumerate(sizes)]
    drafted = [[(r + k) % 5 + (k >= r % 13) for k in range(24)] for r in range(len(sizes))]
    _, gained, bonus = run(target, drafted)
    wanted = [by_loop(*pair, 24) for pair in zip(target, drafted, strict=True)]
    assert gained.tolist() == [len(w) for w in wanted]
    assert bonus.tolist() == [w[-1] for w in wanted]


def test_drafts_may_be_columns_of_something_wider():
    window = torch.tensor([[9, 5, 6, 0], [9, 1, 2, 0]]).to(DEVICE)
    lens = torch.tensor([3, 2], dtype=torch.int32).to(DEVICE)
    choices = torch.tensor([5, 6, 7, 1, 8]).to(DEVICE)
    _, gained, bonus = accept(choices, window[:, 1:], lens, 4)
    assert (gained.tolist(), bonus.tolist()) == ([3, 2], [7, 8])


def test_bad_arguments_are_named():
    one, lens = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    with pytest.raises(TypeError, match="choices"):
        accept(lens, one[:, None], lens, 1)
    with pytest.raises(ValueError, match="drafted"):
        accept(one, one[:1, None], lens, 1)
    with pytest.raises(ValueError, match="limits"):
        accept(one, one[:, None], lens, 1, one[:1])


@not_interpreted
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_compiles_without_spills(limited, capability, tmp_path):
    signature = dict(
        choices="*i64", drafted="*i64", row_stride="i32", stride="i32", lens="*i32",
        limits="*i64", tokens="*i64", gained="*i32", bonus="*i64", width="i32", depth="i32",
    )  # fmt: skip
    constants = {"LIMITED": limited, "LANES": 64, "REQUESTS": 1024}
    check_compiled(kernels.accept, signature, constants, 1, capability, tmp_path)
