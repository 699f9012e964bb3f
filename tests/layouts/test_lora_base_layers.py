"""Names in a wrapped model and in its base: what peft itself has there, for targets told in every way."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

import hf_stream
from hf_stream.layouts import lora_base_layers

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "RuntimeWarning", "FutureWarning")
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.conv = nn.Conv2d(2, 2, 1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(3, 4, 6))
        self.down = nn.Parameter(torch.ones(3, 6, 4))
        self.other = nn.Parameter(torch.ones(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(Attention() for _ in range(3))})
        self.experts = Experts()
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("gone", torch.ones(1), persistent=False)


CONFIGS: dict[str, dict[str, Any]] = {
    "ends of names": {"target_modules": ["q_proj", "embed", "layers.1.conv"]},
    "a regular expression": {"target_modules": r"body\.layers\.[12]\.(q_proj|conv)"},
    "exceptions": {"target_modules": ["q_proj", "conv"], "exclude_modules": ["0.conv", "body.layers.1.q_proj"]},
    "excluded by expression": {"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"},
    "some layers": {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
    "some layers of a pattern": {"target_modules": ["conv"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["head", "embed"]},
    "one parameter": {"target_modules": [], "target_parameters": ["experts.down"]},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["experts.up", "experts.down"]},
}


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("told", ["model", "config", "content"])
def test_names_are_those_that_peft_makes(case: str, told: str) -> None:
    base = Model()
    plain = dict(base.state_dict())
    config = peft.LoraConfig(**CONFIGS[case])
    model = peft.get_peft_model(base, config)
    layout = lora_base_layers({"model": model, "config": config, "content": config.to_dict()}[told])
    wrapped = model.state_dict()
    named = layout(plain)

    own = {name for name in wrapped if "lora_" not in name}
    if told == "model":
        own = {name for name in own if ".modules_to_save." not in name}
    assert named.keys() == own
    assert all(torch.equal(named[name], wrapped[name]) for name in own)
    back = layout.inverse(wrapped)
    assert back.keys() == plain.keys()
    assert all(back[name].data_ptr() == plain[name].data_ptr() for name in plain)
    assert layout.inverse.inverse(plain).keys() == named.keys()


def test_targets_may_be_given_as_names() -> None:
    layout = lora_base_layers(["q"], modules_to_save=["head"], target_parameters=["experts.up"], adapter="mine")
    assert list(layout({name: torch.ones(1) for name in ("a.q.weight", "head.bias", "b.experts.up", "c.weight")})) == [
        "base_model.model.a.q.base_layer.weight",
        "base_model.model.head.original_module.bias",
        "base_model.model.head.modules_to_save.mine.bias",
        "base_model.model.b.experts.base_layer.up",
        "base_model.model.c.weight",
    ]


def test_a_base_is_loaded_into_a_model_of_any_kind() -> None:
    base = Model()
    values = {name: torch.rand_like(t) if t.is_floating_point() else t + 1 for name, t in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "embed"]))
    adapter = {name: t.clone() for name, t in model.state_dict().items() if "lora_" in name}
    result = hf_stream.load_into(model, lora_base_layers(model)(values), strict=False)
    assert result.unexpected_keys == []
    assert set(result.missing_keys) == adapter.keys()
    assert all(
        torch.equal(base.get_parameter(f"body.layers.1.q_proj.base_layer.{x}"), values[f"body.layers.1.q_proj.{x}"])
        for x in ("weight", "bias")
    )
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in adapter.items())


def test_a_prompt_needs_no_other_names() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    plain = dict(base.state_dict())
    model = peft.get_peft_model(base, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    assert lora_base_layers(model)(plain).keys() == {f"base_model.{name}" for name in plain}
    assert lora_base_layers(model).inverse(model.state_dict()).keys() == plain.keys()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("all-linear", "not told by names; pass the model"),
        (None, "no target_modules"),
        ({"target_modules": None}, "no target_modules"),
        (nn.Linear(1, 1), "a PeftModel is wanted"),
    ],
)
def test_targets_that_names_do_not_tell_are_refused(targets: object, message: str) -> None:
    with pytest.raises(hf_stream.LayoutError, match=message):
        lora_base_layers(targets)


def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(hf_stream.LayoutError, match="not a regular expression"):
        lora_base_layers("(")({"a.weight": torch.ones(1)})
