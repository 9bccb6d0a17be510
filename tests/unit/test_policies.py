"""The rules that follow outcomes or thresholds: gemma and failfast."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libraspec_sglang import options
from libraspec_sglang.controller import gemma as gemma_module
from libraspec_sglang.controller import policies
from libraspec_sglang.controller.failfast import FailFast
from libraspec_sglang.controller.gemma import Gemma
from libraspec_sglang.drafters.checkpoint import plan_lengths


def gemma_round(policy, requests, accepted, cap=99):
    """One round in which each request accepts at most so many; returns the lengths."""
    width = policy.first_draft(requests, cap)
    q = torch.full((len(requests), width), float("nan"))
    lengths = policy.decide(q, torch.full((len(requests),), cap), None).numpy()
    assert lengths.max(initial=0) <= width
    policy.learn(requests, q.numpy(), lengths, np.minimum(lengths, accepted))
    return lengths.tolist()


class TestGemma:
    def test_two_up_one_down(self):
        policy = Gemma(block_size=4, max_length=24)
        seen = [gemma_round(policy, ["a"], [n])[0] for n in (9, 9, 0, 0, 7)]
        assert seen == [4, 6, 8, 7, 6]

    def test_almost_everything_accepted_is_a_miss(self):
        policy = Gemma(4, 24)
        gemma_round(policy, ["a"], [3])
        assert gemma_round(policy, ["a"], [0]) == [3]

    @given(st.integers(1, 30), st.integers(1, 30), st.lists(st.integers(0, 40), max_size=40))
    def test_lengths_stay_within_bounds(self, start, most, outcomes):
        policy = Gemma(start, most)
        lengths = [gemma_round(policy, ["a"], [n])[0] for n in outcomes]
        assert all(1 <= length <= most for length in lengths)
        for before, now, kept in zip(lengths, lengths[1:], outcomes, strict=False):
            expected = before + 2 if kept >= before else before - 1
            assert now == min(max(expected, 1), most)

    def test_requests_do_not_share_a_length(self):
        """Also when one takes the other's place in the batch."""
        policy = Gemma(4, 24)
        gemma_round(policy, ["a", "b"], [9, 0])
        assert gemma_round(policy, ["b", "a"], [0, 0]) == [3, 6]
        assert gemma_round(policy, ["new", "a"], [0, 0]) == [4, 5]

    def test_a_request_that_may_not_verify_keeps_its_length(self):
        policy = Gemma(4, 24)
        assert gemma_round(policy, ["a"], [0], cap=0) == [0]
        assert gemma_round(policy, ["a"], [0]) == [4]

    def test_remembers_so_many_requests_and_forgets_the_least_recent(self):
        policy = Gemma(4, 24)
        gemma_round(policy, ["kept"], [9])
        for i in range(gemma_module.REQUESTS_REMEMBERED - 1):
            gemma_round(policy, [f"r{i}"], [9])
        gemma_round(policy, ["kept"], [9])
        for i in range(20):
            gemma_round(policy, [f"s{i}"], [9])
        assert len(policy._length) == gemma_module.REQUESTS_REMEMBERED
        assert gemma_round(policy, ["kept", "r0"], [0, 0]) == [8, 4]


def failfast_by_the_book(confidences, increment, threshold, most):
    """The published loop, one request."""
    length = increment
    while length < most and all(q >= threshold for q in confidences[length - increment : length]):
        length += increment
    return min(length, most)


class TestFailFast:
    def decide(self, confidences, cap=99, increment=2, most=6):
        policy = FailFast(increment, 0.5, most, most)
        return policy.decide(torch.tensor([confidences]), torch.tensor([cap]), None).tolist()[0]

    @given(
        st.lists(st.sampled_from([0.1, 0.5, 0.9, 0.95]), min_size=24, max_size=24),
        st.integers(1, 30),
        st.integers(1, 24),
    )
    def test_equals_the_published_loop(self, confidences, increment, most):
        policy = FailFast(increment, 0.5, most, most)
        q = torch.tensor([confidences[:most]])
        got = policy.decide(q, torch.tensor([99]), None).item()
        assert got == failfast_by_the_book(confidences, increment, 0.5, most)

    def test_the_hesitant_increment_is_verified_whole_and_is_the_last(self):
        assert self.decide([0.9, 0.9, 0.9, 0.4, 0.9, 0.9]) == 4
        assert self.decide([0.4, 0.9, 0.9, 0.9, 0.9, 0.9]) == 2
        assert self.decide([0.5] * 6) == 6  # at the threshold is not below it

    def test_nan_is_hesitation_and_caps_hold(self):
        assert self.decide([float("nan")] * 6) == 2
        assert self.decide([0.9] * 6, cap=3) == 3
        assert self.decide([0.9] * 6, cap=0) == 0

    def test_it_asks_for_more_than_was_drafted(self):
        assert self.decide([0.9, 0.9]) == 4
        assert self.decide([0.9, 0.1]) == 2

    def test_a_batch_is_decided_row_by_row(self):
        policy = FailFast(1, 0.5, 3, 3)
        q = torch.tensor([[0.9, 0.9, 0.9], [0.9, 0.1, 0.9], [0.1, 0.9, 0.9]])
        assert policy.decide(q, torch.tensor([9, 9, 9]), None).tolist() == [3, 2, 1]


class TestOptions:
    def plan(self, **given):
        environ = {options.env_name(k): str(v) for k, v in given.items()}
        return plan_lengths(options.load(environ), 16, host_timed=False)

    def test_they_reach_the_policy(self):
        policy = self.plan(policy="failfast", threshold=0.3, increment=4).policy()
        assert (policy.threshold, policy.increment, policy.max_length) == (0.3, 4, 24)
        assert policy.first_draft("a", 24) == 15
        longer = self.plan(policy="failfast", increment=20).policy()
        assert longer.first_draft("a", 24) == 20
        wide = self.plan(policy="failfast", increment=4, extension="wide").policy()
        assert wide.first_draft("a", 24) == 24
        assert self.plan(policy="gemma", max_length=9).policy().first_draft(["a"], 9) == 9

    def test_defaults_are_published_ones(self):
        policy = self.plan(policy="failfast").policy()
        assert (policy.increment, policy.threshold) == (10, 0.45)
        given = {"block_size": 15, "max_length": 24, "alpha": 2.2, "static_length": 7}
        assert policies.build("failfast", wide=False, **given) == policy

    def test_window_holds_the_longest_length(self):
        assert self.plan(policy="gemma").window == 25
        assert self.plan(policy="failfast", max_length=60).window == 61

    @pytest.mark.parametrize(
        ("field", "value"),
        [("threshold", "0"), ("threshold", "1"), ("threshold", "nan"), ("increment", "0")],
    )
    def test_out_of_range_names_the_flag(self, field, value):
        with pytest.raises(options.OptionError, match=f"--libraspec-{field} .or LIBRASPEC_"):
            self.plan(policy="failfast", **{field: value})
