"""Which passes are captured, and that the controller pays for them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from libraspec_sglang.controller.cost import BatchCost
from libraspec_sglang.controller.libra import Libra
from libraspec_sglang.controller.policy import RoundTimes

pytest.importorskip("sglang")
from libraspec_sglang.engine import graphs
from libraspec_sglang.verify.tiers import tier_of, token_tiers


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 25, 84, 2560])
def test_every_pass_has_a_tier_and_little_padding(most):
    tiers = token_tiers(most)
    assert tiers == sorted(set(tiers)) and tiers[-1] == most
    for rows in range(1, most + 1):
        tier = tier_of(rows, tiers)
        assert rows <= tier <= max(rows, 1.25 * rows)
        assert rows > 8 or tier == rows
    assert tier_of(most + 1, tiers) is None
    assert len(tiers) <= 8 + 4 * max(0, np.log2(most / 8)) + 1


def test_rows_cost_what_their_tier_costs():
    cost = BatchCost(0.01, 7, lambda batch, rows: 1.0 + rows)
    cost.tiers = np.array([1, 2, 4, 8])
    assert cost.seconds(2).tolist() == [2, 2, 3, 5, 5, 9, 9, 9, 9] + [10 + n for n in range(8)]


def test_a_tier_that_is_paid_for_is_filled():
    """Where every row costs, seven are best; where tiers do, one of them is filled."""
    tokens, caps = torch.full((1, 8), 0.9), torch.tensor([8])
    lengths = {}
    for tiers in (None, [1, 2, 4, 6, 9]):
        libra = Libra(9, 8)
        if tiers is not None:
            libra.pay_by_tiers(tiers)
        for rows in (2, 9, 1, 4) * 40:
            paid = rows if tiers is None else tier_of(rows, tiers)
            libra.learn_times(RoundTimes(1, rows, 1e-9, rows, 1.0 + 0.35 * paid, 1e-9))
        lengths[tiers is None] = int(libra.decide(tokens, caps)[0])
    assert 1 + lengths[True] == 7
    assert 1 + lengths[False] == 6


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("use_mla_backend", True, "latent attention"),
        ("sliding_window_size", 128, "sliding-window"),
        ("is_encoder_decoder", True, "encoder"),
        ("model_is_mrope", True, "multimodal rotary"),
    ],
)
def test_targets_that_are_not_captured_by_tiers(field, value, words):
    plain = {"use_mla_backend": False, "sliding_window_size": None,
             "is_encoder_decoder": False, "model_is_mrope": False}  # fmt: skip
    given = SimpleNamespace(**{**plain, field: value})
    given.model_config = given
    assert words in graphs.obstacle(given)
