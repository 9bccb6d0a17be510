"""Device-side length control against the host's controller, which is the definition.

The tests run whatever the public functions choose: the torch twins on CPU, the Triton kernels on
CUDA; :func:`test_the_kernels_under_the_interpreter` repeats them with the kernels on CPU.
"""

import numpy as np
import pytest
import torch
from compiled import SHARED_KIB, check_compiled, rerun_interpreted
from hypothesis import given, settings
from hypothesis import strategies as st

from libraspec_sglang.controller.batch import best_lengths
from libraspec_sglang.controller.calibration import BINS, Calibration
from libraspec_sglang.controller.criterion import algorithm_one, first_lengths
from libraspec_sglang.kernels import length_controller as control
from libraspec_sglang.kernels import length_controller_reference as reference
from libraspec_sglang.kernels import length_controller_triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() and not control.INTERPRETED else "cpu"
NAN, INF = float("nan"), float("inf")
few = settings(max_examples=15 if control.INTERPRETED else 60, derandomize=True)
not_interpreted = pytest.mark.skipif(control.INTERPRETED, reason="needs compiled kernels")


@not_interpreted
def test_the_kernels_under_the_interpreter():
    assert rerun_interpreted(__file__) >= 20


def test_kernels_run_where_they_should(monkeypatch):
    """Off the twins' path, the twins are not called (the comparisons below would be empty)."""
    if DEVICE == "cpu" and not control.INTERPRETED:
        pytest.skip("the twins' path")
    for name in ("confidences", "lengths_algorithm_one", "lengths_batch"):
        monkeypatch.setattr(reference, name, None)
    ids, chance = control.confidences(torch.zeros(2, 3, device=DEVICE))
    ones = torch.ones(2, device=DEVICE)
    caps = torch.ones(2, dtype=torch.int32, device=DEVICE)
    control.lengths_algorithm_one(chance[:, None], ones, caps, block_size=1, max_length=2)
    control.lengths_batch(chance[:, None], caps, torch.ones(3, device=DEVICE))
    assert ids.tolist() == [0, 0]


# -- confidences -------------------------------------------------------------------------


def check_confidences(logits):
    ids, chance = control.confidences(logits.to(DEVICE))
    assert ids.dtype == torch.int64 and chance.dtype == torch.float32
    x = logits.double().numpy()
    top = np.where(np.isnan(x), -INF, x).max(axis=1, keepdims=True)
    finite = np.isfinite(top)
    shifted = np.where(finite, x - np.where(finite, top, 0.0), np.where(x == top, 0.0, -INF))
    total = np.exp(shifted).sum(axis=1)
    expected = np.where(np.isnan(x).any(axis=1), 0.0, 1.0 / np.maximum(total, 1.0))
    assert ids.tolist() == (x == top).argmax(axis=1).tolist()  # the first; 0 if all are NaN
    np.testing.assert_allclose(chance.cpu().numpy(), expected, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rows, width", [(1, 1), (3, 2), (4, 4096), (5, 4097), (2, 9001), (1, 40000)]
)
def test_confidences_of_random_logits(dtype, rows, width):
    torch.manual_seed(rows + width)
    check_confidences((torch.randn(rows, width) * 4).to(dtype))


def test_confidences_in_one_launch(monkeypatch):
    """As many rows do it: no row is split."""
    monkeypatch.setattr(control, "PROGRAMS_WANTED", 1)
    torch.manual_seed(2)
    logits = torch.randn(3, 9001) * 4
    step = control.VOCABULARY_BLOCK
    logits[0, [17, 17 + step, 17 + 2 * step]] = 50.0  # equal logits that meet in one lane
    check_confidences(logits)
    monkeypatch.undo()
    check_confidences(torch.randn(control.PROGRAMS_WANTED, 40) * 4)


def test_equal_logits_go_to_the_smallest_id():
    logits = torch.zeros(4, 9000, dtype=torch.bfloat16)
    logits[0, [8999, 4500, 17]] = 2.0
    logits[1, [8191, 8192]] = 2.0
    logits[2, 8999] = 2.0  # the last column
    check_confidences(logits)
    assert control.confidences(logits.to(DEVICE))[0].tolist() == [17, 8191, 8999, 0]


def test_nan_and_infinite_logits():
    logits = torch.full((8, 5000), -1.0)
    logits[0, 4999] = NAN
    logits[1, [0, 4100]] = torch.tensor([NAN, 5.0])  # the NaN and the best in different chunks
    logits[2] = NAN
    logits[3, [7, 4998]] = INF
    logits[4, [7, 4998]] = torch.tensor([INF, NAN])
    logits[5] = -INF
    logits[6, 1:] = -INF
    logits[7, :4999] = -INF
    check_confidences(logits)
    ids, chance = control.confidences(logits.to(DEVICE))
    assert ids.tolist() == [0, 4100, 0, 7, 7, 0, 0, 4999]
    assert chance.tolist() == pytest.approx([0, 0, 0, 0.5, 0, 1 / 5000, 1, 1], rel=1e-6)


def test_rising_and_large_logits_do_not_overflow():
    rising = torch.linspace(-3e4, 3e4, 9000)
    check_confidences(torch.stack([rising, rising.flip(0), rising / 3e4]))


def test_strided_rows_and_given_outputs():
    torch.manual_seed(0)
    whole = torch.randn(6, 3, 5000)
    check_confidences(whole[:, 1])
    out = (
        torch.empty(6, dtype=torch.int64, device=DEVICE),
        torch.empty(6, dtype=torch.float32, device=DEVICE),
    )
    ids, chance = control.confidences(whole[:, 1].to(DEVICE), out=out)
    assert ids is out[0] and chance is out[1]
    assert ids.tolist() == whole[:, 1].argmax(dim=1).tolist()
    assert control.confidences(whole[:0, 1].to(DEVICE))[0].shape == (0,)


# -- Algorithm 1 -------------------------------------------------------------------------


def check_algorithm_one(q, alpha, caps, block_size, max_length):
    alpha = torch.as_tensor(alpha, dtype=torch.float64)
    caps = torch.as_tensor(caps)
    lengths = control.lengths_algorithm_one(
        q.to(DEVICE), alpha.to(DEVICE), caps.to(DEVICE),
        block_size=block_size, max_length=max_length,
    ).cpu()  # fmt: skip
    wanted = first_lengths(q, alpha, block_size=block_size, max_length=max_length)
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == torch.minimum(wanted, caps).tolist()
    twin = reference.lengths_algorithm_one(q, alpha, caps, block_size, max_length)
    assert lengths.equal(twin)
    return lengths


@few
@given(st.data())
def test_algorithm_one_is_the_criterion(data):
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 64))
    max_length = data.draw(st.integers(1, 70))
    block_size = data.draw(st.integers(1, min(width, max_length)))
    values = data.draw(st.sampled_from([
        st.sampled_from([0.0, 0.5, 1.0, NAN, 2.0, -1.0]),
        st.sampled_from([0.9, 0.99, 1.0]),
        st.floats(0.0, 1.0, width=32),
    ]))  # fmt: skip
    count = rows * width
    q = torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count)))
    alphas = st.sampled_from([0.1, 0.5, 1.0, 2.0, 2.2, 10.0, 1e12])
    alpha = data.draw(st.lists(alphas, min_size=rows, max_size=rows))
    caps = data.draw(st.lists(st.integers(0, 70), min_size=rows, max_size=rows))
    check_algorithm_one(q.view(rows, width), alpha, caps, block_size, max_length)


@pytest.mark.parametrize("rows, width", [(1, 1), (1, 64), (256, 1), (256, 8), (33, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_algorithm_one_on_random_confidences(rows, width, dtype):
    torch.manual_seed(rows * width)
    q = torch.rand(rows, width, dtype=dtype) ** 0.15
    alpha = 1.0 + 2.0 * torch.rand(rows)
    caps = torch.randint(0, width + 1, (rows,))
    check_algorithm_one(q, alpha, caps, max(1, width // 2), width)
    check_algorithm_one(q, alpha, torch.full((rows,), 99), max(1, width // 3), width + 8)


def test_algorithm_one_of_one_request_with_everything_drafted():
    torch.manual_seed(1)
    for row in torch.rand(12, 24) ** 0.1:
        expected = algorithm_one(row.tolist(), 8, 24, 2.2)[0]
        assert check_algorithm_one(row[None], [2.2], [24], 8, 24).tolist() == [expected]


def test_algorithm_one_at_integer_boundaries():
    """alpha * sum lands on an integer, or one bit beside it."""
    q = torch.ones(4, 30)
    below, above = np.nextafter(0.1, 0), np.nextafter(0.1, 1)
    lengths = check_algorithm_one(q, [0.1, below, above, 1.0], [60] * 4, 10, 60)
    assert lengths.tolist() == [2, 1, 2, 31]


def test_algorithm_one_without_alpha_or_room():
    q = torch.ones(3, 8)
    caps = torch.tensor([8, 0, -1], dtype=torch.int32)
    alpha = torch.tensor([0.0, 2.0, NAN])
    lengths = control.lengths_algorithm_one(
        q.to(DEVICE), alpha.to(DEVICE), caps.to(DEVICE), block_size=4, max_length=8
    )
    assert lengths.tolist() == [1, 0, 0]


# -- batch-wide lengths ------------------------------------------------------------------


def check_batch(values, caps, seconds, tables=None):
    """Against the host's loop and the twin; returns the lengths."""
    seconds, caps = torch.as_tensor(seconds), torch.as_tensor(caps)
    on_device = None if tables is None else tuple(table.to(DEVICE) for table in tables)
    lengths = control.lengths_batch(
        values.to(DEVICE), caps.to(DEVICE), seconds.to(DEVICE), tables=on_device
    ).cpu()
    survival = values.double().numpy()
    if tables is not None:
        calibration = Calibration(values.shape[1])
        survival = np.empty(values.shape)
        for row, which in enumerate(tables[2].int().tolist()):
            calibration._base, calibration._slope = (t[which].numpy() for t in tables[:2])
            survival[row] = calibration.survival(values[row : row + 1].numpy())
    limits = caps.numpy().clip(0, values.shape[1]).astype(np.int64)
    wanted = best_lengths(survival, limits, seconds.double().numpy())
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == wanted.tolist()
    assert lengths.equal(reference.lengths_batch(values, caps, seconds, tables))
    return lengths.tolist()


@few
@given(st.data())
def test_batch_lengths_are_the_hosts(data):
    """Values with few bits, so that sums are exact and ties are ties everywhere."""
    rows, depth = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    count = rows * depth

    def draw(kind, size):
        return data.draw(st.lists(kind, min_size=size, max_size=size))

    fractions = st.integers(0, 8).map(lambda n: n / 8)
    values = draw(st.one_of(fractions, st.sampled_from([NAN, -1.0, 3.0, INF])), count)
    survival = torch.tensor(values).view(rows, depth)
    if data.draw(st.booleans()):  # as they are in practice
        survival = survival.nan_to_num(0.5, posinf=1.0).clamp(0, 1).cumprod(dim=1)
    caps = draw(st.integers(-1, depth + 1), rows)
    curve = data.draw(st.sampled_from(["flat", "line", "steps", "any", "zero"]))
    x = np.arange(count + 1)
    seconds = {
        "flat": np.ones(count + 1),
        "line": 1.0 + x / 8,
        "steps": 1.0 + np.ceil((rows + x) / 4),
        "any": np.array(draw(st.integers(1, 16), count + 1), dtype=np.float64),
        "zero": np.zeros(count + 1),
    }[curve]
    check_batch(survival, caps, seconds)


@pytest.mark.parametrize(
    "rows, depth", [(1, 1), (1, 64), (256, 1), (37, 24), (64, 15), (129, 5), (2, 1000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_lengths_on_random_survivals(rows, depth, dtype):
    torch.manual_seed(rows * depth)
    survival = (torch.rand(rows, depth, dtype=dtype) ** min(0.1, 10 / depth)).cumprod(dim=1)
    x = torch.arange(rows * depth + 1, dtype=torch.float64)
    caps = torch.randint(0, depth + 1, (rows,))
    check_batch(survival, caps, 1.0 + 0.3 * x / rows)
    uneven = 1.0 + x / rows * torch.rand(rows * depth + 1, dtype=torch.float64)
    check_batch(survival, torch.full((rows,), depth, dtype=torch.int32), uneven)


def test_the_largest_batch():
    torch.manual_seed(3)
    survival = (torch.rand(256, 64) ** 0.05).cumprod(dim=1)
    x = torch.arange(16385, dtype=torch.float64)
    lengths = check_batch(survival, torch.randint(1, 65, (256,)), 30.0 + x / 100)
    assert 1000 < sum(lengths) < 15000


def test_batch_lengths_calibrated():
    rng = np.random.default_rng(5)
    confidence = rng.random((40, 12)).astype(np.float32) ** 0.3
    learnt = []
    for power in (2, 5):
        calibration = Calibration(16)
        for _ in range(16):
            accepted = (rng.random((40, 12)) < confidence**power).cumprod(axis=1).sum(axis=1)
            calibration.update(confidence, np.full(40, 12), accepted)
        learnt.append(calibration.tables())
    base, slope = (torch.from_numpy(np.stack(parts)) for parts in zip(*learnt, strict=True))
    assert base.shape == (2, 16, BINS) and base[0].any() and not base[0].equal(base[1])
    tables = base, slope, torch.from_numpy(rng.integers(0, 2, 40).astype(np.float64))
    confidence[0, :3] = 0.0, 1.0, NAN
    confidence[1, :3] = 1.0, 7.0, -1.0
    seconds = 1.0 + np.arange(481) / 100
    values = torch.from_numpy(confidence)
    lengths = check_batch(values, np.full(40, 12), seconds, tables)
    assert lengths != check_batch(values.cumprod(dim=1), np.full(40, 12), seconds)


def test_batch_lengths_of_extreme_survivals():
    cheap = 1.0 + np.arange(13) / 1e3
    full = [3, 3, 3, 3]
    assert check_batch(torch.zeros(4, 3), full, cheap) == [0, 0, 0, 0]
    assert check_batch(torch.full((4, 3), NAN), full, cheap) == [0, 0, 0, 0]
    assert check_batch(torch.ones(4, 3), full, cheap) == full
    assert check_batch(torch.ones(4, 3), [0, 0, 0, 0], cheap) == [0, 0, 0, 0]
    # One more row brings exactly the average: a tie, so none is taken.
    assert check_batch(torch.ones(4, 3), full, 4.0 + np.arange(13)) == [0, 0, 0, 0]
    # Barely above zero still counts as usable where more rows are faster.
    assert check_batch(torch.full((4, 3), 1e-30), full, np.linspace(2, 1, 13)) == full
    hole = torch.tensor([[0.9, NAN, 0.9], [0.9, 0.0, 0.9], [0.5, 0.9, 0.5], [INF, 2.0, 1.0]])
    assert check_batch(hole, full, cheap) == [1, 1, 3, 3]


def test_survivals_below_the_step_cost_at_most_a_step_each():
    """Where only dust is left, another choice than the host's may be made; the rate is as good."""
    torch.manual_seed(6)
    survival = (torch.rand(3, 400) ** 0.2).cumprod(dim=1).double()
    seconds = 1.0 + torch.rand(1201, dtype=torch.float64)
    caps = torch.full((3,), 400)
    values = [t.to(DEVICE) for t in (survival, caps, seconds)]
    lengths = control.lengths_batch(*values).cpu().long()
    assert lengths.max() > 200

    def rate(lengths):
        taken = survival[torch.arange(400) < lengths[:, None]].sum()
        return float((3.0 + taken) / seconds[lengths.sum()])

    best = torch.from_numpy(best_lengths(survival.numpy(), caps.numpy(), seconds.numpy()))
    assert rate(lengths) == pytest.approx(rate(best), rel=1e-12)


def test_equal_survivals_go_by_request_then_depth():
    seconds = np.full(7, 2.0)
    seconds[3] = 1.0
    assert check_batch(torch.full((3, 2), 0.5), [2, 2, 2], seconds) == [2, 1, 0]


def test_batch_lengths_of_a_view_into_a_given_output():
    torch.manual_seed(4)
    survival = torch.rand(5, 7).cumprod(dim=1)
    out = torch.full((5,), -9, dtype=torch.int32, device=DEVICE)
    caps = torch.full((5,), 7, device=DEVICE)
    seconds = 1.0 + torch.arange(50, dtype=torch.float32, device=DEVICE) / 64  # longer than needed
    lengths = control.lengths_batch(survival.T.contiguous().to(DEVICE).T, caps, seconds, out=out)
    assert lengths is out
    assert out.tolist() == check_batch(survival, caps.cpu(), seconds.cpu())
    empty = control.lengths_batch(survival[:, :0].to(DEVICE), caps, seconds)
    assert empty.tolist() == [0] * 5


# -- arguments ---------------------------------------------------------------------------


def test_wrong_arguments_are_named():
    q, caps, ones = torch.ones(2, 3), torch.ones(2, dtype=torch.int64), torch.ones(2)
    seconds, table = torch.ones(7), torch.ones(1, 3, 12)
    with pytest.raises(TypeError, match="logits"):
        control.confidences(q.double())
    with pytest.raises(ValueError, match="columns"):
        control.confidences(torch.ones(3, 2).T)
    with pytest.raises(ValueError, match="out"):
        control.confidences(q, out=(caps, ones.double()))
    with pytest.raises(ValueError, match="alpha"):
        control.lengths_algorithm_one(q, ones[:1], caps, block_size=1, max_length=2)
    with pytest.raises(ValueError, match="block_size"):
        control.lengths_algorithm_one(q, ones, caps, block_size=0, max_length=2)
    with pytest.raises(TypeError, match="caps"):
        control.lengths_batch(q, ones, seconds)
    with pytest.raises(ValueError, match="seconds"):
        control.lengths_batch(q, caps, seconds[:6])
    with pytest.raises(ValueError, match="slope"):
        control.lengths_batch(q, caps, seconds, tables=(table, table[:, :, :4], ones.double()))
    with pytest.raises(TypeError, match="which"):
        control.lengths_batch(q, caps, seconds, tables=(table, table, caps))
    with pytest.raises(ValueError, match="16384"):
        control.lengths_batch(torch.ones(257, 64), torch.ones(257, dtype=torch.int64), seconds)


# -- compiled without a GPU --------------------------------------------------------------

LOGITS = dict(
    logits="*bf16", row_stride="i32", width="i32", chunk="i32", ids="*i64", chance="*fp32",
    part_top="*fp32", part_total="*fp32", part_token="*i32",
)  # fmt: skip
COMBINE = dict(
    part_top="*fp32", part_total="*fp32", part_token="*i32", splits="i32", ids="*i64",
    chance="*fp32",
)  # fmt: skip
ALGORITHM_ONE = dict(
    confidence="*fp32", row_stride="i32", stride="i32", alpha="*fp32", caps="*i64", out="*i32",
    rows="i32", steps="i32", first_length="i32", max_length="i32",
)  # fmt: skip
BATCH = dict(
    values="*fp32", row_stride="i32", stride="i32", base="*fp64", slope="*fp64",
    which="*fp64", caps="*i64", seconds="*fp64", scratch="*i64", out="*i32", rows="i32",
    depth="i32", table_depth="i32",
)  # fmt: skip


def batch(bins, columns):
    block = control.BATCH_BLOCK
    tile = {"COLUMNS": columns, "ROWS": max(1, block // columns), "BLOCK": block}
    return "batch", BATCH, {"BINS": bins, **tile}, control.BATCH_WARPS


def logits(split):
    constants = {"BLOCK": control.VOCABULARY_BLOCK, "SPLIT": split}
    return "confidences", LOGITS, constants, control.VOCABULARY_WARPS


VARIANTS = [
    logits(True),
    logits(False),
    ("combine", COMBINE, {"LANES": 64}, 1),
    ("algorithm_one", ALGORITHM_ONE, {"REQUESTS": control.REQUESTS, "LANES": 64}, 4),
    batch(0, 16),
    batch(BINS, 64),
]


@not_interpreted
@pytest.mark.parametrize("name, signature, constants, warps", VARIANTS)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_compiles_without_spills(name, signature, constants, warps, capability, tmp_path):
    check_compiled(
        getattr(kernels, name), signature, constants, warps, capability, tmp_path,
        aligned=("row_stride", "width", "chunk"), fused=name == "confidences",
    )  # fmt: skip
