"""What a cost file is for, in words."""

import pytest
import torch

pytest.importorskip("sglang")
from libraspec_sglang.controller.cost_file import Cost, CostError, Forward
from libraspec_sglang.engine import machine

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


def test_names_tell_what_cost_follows_from():
    name = machine.model_name(CONFIG, torch.float32, None)
    assert name == ("LlamaForCausalLM, 30 layers, hidden 576, MLP 1536, vocabulary 49152, float32")
    assert machine.model_name(CONFIG, torch.bfloat16, "fp8").endswith("bfloat16, fp8")
    assert "threads" in machine.device_name("cpu")
    assert machine.device_name("cpu", 2).endswith(" x 2")


@pytest.mark.parametrize("name", ["device", "target", "drafter"])
def test_another_machine_or_model_is_refused(name):
    forward = Forward(rows=[1], seconds=[0.1])
    own = {"device": "d", "target": "t", "drafter": "f"}
    cost = Cost(version=1, measured=True, how="h", verify=forward, draft=forward, **own)
    cost.check(**own)
    with pytest.raises(CostError, match=f"for the {name} .*this is 'other'.*cost-unchecked"):
        cost.check(**{**own, name: "other"})
