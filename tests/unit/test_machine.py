"""What a cost file is for, in words."""

import pytest
import torch

pytest.importorskip("sglang")
from libraspec_sglang.controller import cost_file
from libraspec_sglang.controller.cost_file import Cost, CostError, Forward
from libraspec_sglang.engine import machine
from libraspec_sglang.options import OptionError, Options

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


def test_the_option_that_names_it_and_the_way_out_are_in_the_message(tmp_path):
    forward = Forward(rows=[1], seconds=[0.1])
    own = {"device": "d", "target": "t", "drafter": "f"}
    file = tmp_path / "other.yaml"
    cost = Cost(version=1, measured=True, how="h", verify=forward, draft=forward, **own)
    cost_file.write(cost, file)
    assert machine.cost(Options(cost=str(file)), own) == cost
    other = {**own, "target": "another"}
    with pytest.raises(OptionError, match=r"--libraspec-cost .*other\.yaml: made for.*unchecked"):
        machine.cost(Options(cost=str(file)), other)
    assert machine.cost(Options(cost=str(file), cost_unchecked=True), other) == cost
    with pytest.raises(OptionError, match=r"--libraspec-cost .*nowhere\.yaml"):
        machine.cost(Options(cost=str(tmp_path / "nowhere.yaml")), own)
