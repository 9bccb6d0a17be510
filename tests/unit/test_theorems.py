"""The paper's theorems (arXiv 2608.08721, section 3) as properties, and where they end.

The model: independent acceptance probabilities p_k, a cost T_d = T_0 + c d that is linear in the
verified tokens. Outside of it (stepped cost; Algorithm 1's constant alpha and products that start
at i) the second half shows what fails, and that `batch.allocate`, which libra decides by, does not.
"""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from libraspec_sglang.controller import criterion
from libraspec_sglang.controller.batch import allocate

probabilities = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12)
bases, slopes = st.floats(0.01, 10.0), st.floats(0.01, 3.0)
CLOSE = 1e-9


def linear(base, slope, depth):
    return [base + slope * d for d in range(1, depth + 1)]


def rises(values):
    return [b > a * (1 + CLOSE) for a, b in itertools.pairwise(values)]


@given(probabilities, st.lists(st.floats(0.01, 3.0), min_size=12, max_size=12), st.data())
def test_3_2_an_adjustment_pays_iff_the_speedup_rises(p, steps, data):
    """Whatever the cost's shape, as long as it rises."""
    verify = np.cumsum(steps)[: len(p)].tolist()
    d, other = (data.draw(st.integers(1, len(p))) for _ in range(2))
    eta = criterion.speedup(p, verify).tolist()
    assume(abs(eta[other - 1] - eta[d - 1]) > CLOSE * eta[d - 1])
    assert criterion.adjustment_pays(p, verify, d, other) == (eta[other - 1] > eta[d - 1])


@given(probabilities, bases, slopes)
def test_3_4_extending_within_every_suffix_bound_improves(p, base, slope):
    """Where 3.2 holds of the suffix from every i (its product from 1, T_i / tau_i c its alpha), the
    new length is better than every shorter one, and than all between."""
    verify = linear(base, slope, len(p))
    expected = criterion.expected_accepted(p).tolist()
    eta = criterion.speedup(p, verify).tolist()
    for d in range(2, len(p) + 1):
        within = all(
            d - i < verify[i - 1] / (expected[i - 1] * slope) * (expected[d - 1] - expected[i - 1])
            for i in range(1, d)
        )
        if within:
            assert eta[d - 1] >= max(eta[:d]) * (1 - CLOSE)


@given(probabilities, bases, slopes, st.floats(0.0, 5.0))
def test_3_5_speedup_has_one_peak(p, base, slope, draft):
    eta = criterion.speedup(p, linear(base, slope, len(p)), draft=draft).tolist()
    up = rises(eta)
    assert up == sorted(up, reverse=True)  # never up again after it went down


@given(probabilities, bases, slopes)
def test_3_5_the_next_token_pays_iff_its_survival_is_above_the_rate(p, base, slope):
    verify = linear(base, slope, len(p))
    expected = criterion.expected_accepted(p).tolist()
    for d in range(1, len(p)):
        survival, rate = expected[d] - expected[d - 1], expected[d - 1] / verify[d - 1]
        assume(abs(survival - slope * rate) > CLOSE)
        assert criterion.adjustment_pays(p, verify, d, d + 1) == (survival > slope * rate)


@given(probabilities, bases, slopes, st.data())
def test_3_6_beneficial_adjustments_reach_the_optimum(p, base, slope, data):
    """From any length, any beneficial adjustment each time, to the best length of all."""
    verify = linear(base, slope, len(p))
    length, eta = data.draw(st.integers(1, len(p))), criterion.speedup(p, verify).tolist()
    seen = []
    while True:
        assert length not in seen  # finitely many steps
        seen.append(length)
        better = [
            d for d in range(1, len(p) + 1)
            if criterion.adjustment_pays(p, verify, length, d)
            and eta[d - 1] > eta[length - 1] * (1 + CLOSE)
        ]  # fmt: skip
        if not better:
            break
        length = data.draw(st.sampled_from(better))
    assert eta[length - 1] == pytest.approx(max(eta))


@given(probabilities, bases, slopes)
def test_3_6_single_steps_are_enough(p, base, slope):
    verify, length = linear(base, slope, len(p)), 1
    while length < len(p) and criterion.adjustment_pays(p, verify, length, length + 1):
        length += 1
    eta = criterion.speedup(p, verify).tolist()
    assert eta[length - 1] == pytest.approx(max(eta))
    assert eta[criterion.best_length(p, verify) - 1] == max(eta)


class TestOutsideTheModel:
    """A search for counter-examples over a grid of small cases; what it finds is asserted."""

    def best(self, p, cost):
        """The best length with the bonus token counted, 0 included, by trying all."""
        rates = [
            (1 + sum(np.cumprod(p)[:d])) / cost(1 + d) for d in range(len(p) + 1)
        ]  # fmt: skip
        return rates, max(rates)

    def libra(self, p, cost):
        (length,) = allocate(np.cumprod([p], axis=1), cost)
        return int(length)

    def test_with_a_stepped_cost_speedup_has_several_peaks(self):
        """Single steps stop before a tier that is paid for anyway; allocate does not."""
        stuck = 0
        for p in itertools.product((0.5, 0.8, 0.95), repeat=4):
            for tier in (2, 3, 4):

                def cost(rows, tier=tier):
                    return 1.0 + 0.8 * np.ceil(np.asarray(rows) / tier)

                verify = [float(cost(d)) for d in range(1, 5)]
                eta = criterion.speedup(p, verify).tolist()
                up = rises(eta)
                stuck += up != sorted(up, reverse=True)
                rates, best = self.best(p, cost)
                assert rates[self.libra(p, cost)] == pytest.approx(best)
        assert stuck > 20

    def test_confidences_that_are_not_monotone_mislead_algorithm_one_not_allocate(self):
        """A doubtful token early on: eps_i of the sure suffix behind it starts its product at i, as
        if that token were accepted already, and the one constant alpha prices all lengths alike."""
        base, slope = 1.0, 0.12
        worse = 0
        for p in itertools.product((0.3, 0.6, 0.95), repeat=5):

            def cost(rows):
                return base + slope * np.asarray(rows)

            rates, best = self.best(p, cost)
            assert rates[self.libra(p, cost)] == pytest.approx(best)
            length, _ = criterion.algorithm_one(p, 3, 5, 2.2)
            worse += rates[length] < 0.98 * best
        assert worse > 50

    def test_one_of_them_in_numbers(self):
        """Three sure tokens behind one of chance 0.3: Algorithm 1 verifies all, plain is better."""
        p, cost = [0.3, 0.95, 0.95, 0.95, 0.95], lambda rows: 1.0 + 0.5 * np.asarray(rows)
        assert criterion.algorithm_one(p, 3, 5, 4.0)[0] == 5
        rates, best = self.best(p, cost)
        assert self.libra(p, cost) == int(np.argmax(rates)) == 0
        assert rates[5] < 0.97 * best
