"""Algorithm 1 and the theorems, against definitions written out in plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libraspec_sglang.controller import criterion, policies

probabilities = st.floats(0.0, 1.0, width=32)
alphas = st.floats(0.05, 40.0)


def eps_by_definition(q, i, d, alpha):
    """floor(alpha * sum_{j=i..d} prod_{k=i..j} q_k) + i with 1-based i, term by term."""
    total = sum(math.prod(q[k - 1] for k in range(i, j + 1)) for j in range(i, d + 1))
    return math.floor(alpha * total) + i


@given(st.lists(probabilities, min_size=1, max_size=8), st.sampled_from([0.5, 1.0, 2.0, 4.0]))
def test_suffix_bounds_are_the_definition(q, alpha):
    # Powers of two and short runs: both orders of summation are then within one rounding, and the
    # floors can differ only where the sum itself is at an integer boundary.
    bounds = criterion.suffix_bounds(q, len(q), alpha)
    for i, bound in enumerate(bounds, 1):
        expected = eps_by_definition(q, i, len(q), alpha)
        if bound != expected:
            total = alpha * sum(
                math.prod(q[k] for k in range(i - 1, j)) for j in range(i, len(q) + 1)
            )
            assert abs(total - round(total)) < 1e-9
            assert abs(bound - expected) == 1


def test_integer_boundaries_are_exact():
    # alpha * q == 1 exactly: the last position allows exactly one more token ...
    assert criterion.suffix_bounds([1.0, 0.5], 2, 2.0)[-1] == 3
    # ... and one ulp less does not.
    assert criterion.suffix_bounds([1.0, math.nextafter(0.5, 0)], 2, 2.0)[-1] == 2
    # A large position must not swallow the fraction: floor first, add i after.
    q = [1.0] * 63 + [math.nextafter(0.5, 0)]
    assert criterion.suffix_bounds(q, 64, 2.0)[-1] == 64


def test_expected_accepted():
    assert criterion.expected_accepted([0.5, 0.5, 1.0]).tolist() == [0.5, 0.75, 1.0]
    batch = criterion.expected_accepted(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    assert batch.tolist() == [[1.0, 2.0], [0.0, 0.0]]


def test_confident_block_extends_to_the_maximum_and_counts_blocks():
    assert criterion.algorithm_one([1.0] * 24, 15, 24, 2.2) == (24, 2)
    assert criterion.algorithm_one([1.0] * 60, 10, 60, 2.0) == (60, 6)


def test_a_weak_last_token_rolls_back_once():
    q = [1.0] * 9 + [0.0] + [1.0] * 50
    # At i = 10 the suffix sum is 0 (its first token fails), so eps_10 = 10 = d: stop at 10.
    assert criterion.algorithm_one(q, 10, 60, 2.0) == (10, 1)
    q = [1.0, 0.0, 0.0] + [1.0] * 7
    assert criterion.algorithm_one(q, 8, 10, 2.0) == (2, 1)


def test_doubtful_first_token_leaves_one():
    assert criterion.algorithm_one([0.0] * 24, 15, 24, 2.2) == (1, 1)


def test_budget_is_consumed_before_a_new_block_is_drafted():
    # alpha * q = 2: every step asks for two more (4, 6, 8, ...); a block of 4 serves two steps.
    assert criterion.algorithm_one([1.0] * 12, 4, 12, 2.0) == (12, 3)
    assert criterion.algorithm_one([1.0] * 12, 4, 7, 2.0) == (7, 2)


@settings(max_examples=300)
@given(
    st.lists(st.lists(probabilities, min_size=24, max_size=24), min_size=1, max_size=5),
    st.integers(1, 24),
    st.integers(1, 24),
    alphas,
)
def test_batch_form_equals_the_scalar_reference(rows, block, most, alpha):
    q = torch.tensor(rows, dtype=torch.float32)
    got = criterion.first_lengths(q, alpha, block_size=block, max_length=most).tolist()
    for row, length in zip(q.tolist(), got, strict=True):
        expected, _ = criterion.algorithm_one(row, block, most, alpha)
        if length != expected:
            assert _near_boundary(row, alpha), (row, alpha, length, expected)


def _near_boundary(q, alpha):
    """Whether some alpha * S is within rounding of an integer, where float order decides."""
    for d in range(1, len(q) + 1):
        tail = 0.0
        for i in range(d, 0, -1):
            tail = q[i - 1] * (1 + tail)
            if abs(alpha * tail - round(alpha * tail)) < 1e-9 and tail:
                return True
    return False


def test_batch_form_asks_for_more_than_it_was_given():
    lengths = criterion.first_lengths(torch.ones(2, 15), 2.2, block_size=15, max_length=24)
    assert lengths.tolist() == [17, 17]  # eps_15 = floor(2.2) + 15, two past the draft
    lengths = criterion.first_lengths(torch.full((1, 15), 0.6), 2.2, block_size=15, max_length=24)
    assert lengths.tolist() == [4]  # eps_1 = floor(2.2 * 1.5) + 1 binds: a roll-back


def test_batch_form_takes_alpha_per_request_and_treats_nan_as_no_confidence():
    q = torch.full((3, 8), 0.5)
    q[2] = float("nan")
    got = criterion.first_lengths(
        q, torch.tensor([0.1, 20.0, 2.2], dtype=torch.float64), block_size=4, max_length=8
    )
    assert got[0] < got[1]
    assert got[1] == 8
    assert got[2] == 1


@given(st.lists(probabilities, min_size=24, max_size=24), alphas, st.floats(1.0, 3.0))
def test_larger_alpha_never_verifies_less(q, alpha, factor):
    low, _ = criterion.algorithm_one(q, 15, 24, alpha)
    high, _ = criterion.algorithm_one(q, 15, 24, alpha * factor)
    assert high >= low


@pytest.mark.parametrize(
    ("block", "most", "alpha", "word"),
    [
        (0, 8, 1.0, "block_size"),
        (4, 0, 1.0, "max_length"),
        (4, 8, 0.0, "alpha"),
        (4, 8, float("nan"), "alpha"),
    ],
)
def test_bad_parameters_are_named(block, most, alpha, word):
    with pytest.raises(ValueError, match=word):
        criterion.algorithm_one([0.5] * 8, block, most, alpha)
    with pytest.raises(ValueError, match=word):
        criterion.first_lengths(torch.ones(1, 8), alpha, block_size=block, max_length=most)


def test_a_huge_alpha_verifies_everything():
    q = torch.full((2, 24), 0.01)
    assert criterion.first_lengths(q, 1e300, block_size=15, max_length=24).tolist() == [24, 24]


def test_too_few_confidences():
    with pytest.raises(ValueError, match="need 8 confidences"):
        criterion.algorithm_one([0.5] * 4, 4, 8, 1.0)


class TestPolicies:
    def build(self, name, **changed):
        given = {"block_size": 15, "max_length": 24, "alpha": 2.2, "static_length": 7, "wide": True}
        return policies.build(name, **{**given, **changed})

    def test_static_and_none(self):
        q = torch.zeros(3, 7)
        caps = torch.tensor([9, 7, 2])
        assert self.build("static").decide(q, caps, None).tolist() == [7, 7, 2]
        assert self.build("none").decide(q, caps, None).tolist() == [0, 0, 0]
        assert self.build("none").first_draft("abc", 9) == 0
        assert self.build("static").first_draft("abc", 9) == 7
        assert self.build("static", static_length=0).first_draft("abc", 9) == 0

    def test_first_pass_is_wide_or_one_block(self):
        assert self.build("libraspec").first_draft("a", 24) == 24
        assert self.build("libraspec", wide=False).first_draft("a", 24) == 15
        assert self.build("libraspec", wide=False, max_length=4).first_draft("a", 24) == 4
        assert self.build("libraspec").first_draft("a", 0) == 0

    def test_short_maximum_keeps_control(self):
        policy = self.build("libraspec", max_length=4)
        caps = torch.tensor([4])
        assert policy.decide(torch.zeros(1, 4), caps, None).tolist() == [1]
        assert policy.decide(torch.ones(1, 4), caps, None).tolist() == [4]
        assert policy.decide(torch.ones(1, 4), torch.tensor([2]), None).tolist() == [2]

    def test_unknown(self):
        with pytest.raises(ValueError, match="unknown policy 'best'"):
            self.build("best")
