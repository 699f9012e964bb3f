"""Recurrent layers have a list of their weights besides the parameters: it too must hold what was loaded."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import hf_stream
from hf_stream.integrations.peft import load_base_model

_KINDS = ("UserWarning", "RuntimeWarning", "FutureWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in _KINDS]


class Recurrent(PreTrainedModel):
    config_class = transformers.BertConfig

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.lstm = nn.LSTM(config.hidden_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(inputs)[0])
        return found


@pytest.fixture(scope="module")
def model() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(transformers.BertConfig(hidden_size=8))


def assert_runs_on_its_parameters(lstm: nn.Module) -> None:
    held = lstm._flat_weights
    assert isinstance(held, list)
    assert [id(weight) for weight in held] == [id(weight) for weight in lstm.parameters()]


def test_a_loaded_model_runs_on_its_parameters_and_learns(model: Recurrent, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = hf_stream.from_pretrained(Recurrent, tmp_path)
    assert_runs_on_its_parameters(loaded.lstm)
    inputs = torch.randn(3, 8)
    before = loaded(inputs)
    assert torch.equal(before, model(inputs))
    before.sum().backward()
    with torch.no_grad():
        loaded.lstm.weight_hh_l0 -= loaded.lstm.weight_hh_l0.grad
    assert not torch.equal(loaded(inputs), before)


def test_a_wrapped_model_without_memory_runs_on_the_parameters_that_it_gets(model: Recurrent, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = Recurrent(model.config)
    wrapped = peft.get_peft_model(empty, peft.LoraConfig(target_modules=["head"]))
    load_base_model(wrapped, tmp_path)
    assert_runs_on_its_parameters(wrapped.get_base_model().lstm)
    inputs = torch.randn(3, 8)
    assert torch.equal(wrapped(inputs=inputs), model(inputs))
