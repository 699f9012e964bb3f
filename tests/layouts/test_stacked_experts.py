"""The merged experts against transformers' own conversion of the same checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from hf_stream.errors import LayoutError
from hf_stream.layouts import Layout, stacked_experts

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
QWEN = Qwen3MoeConfig(**SIZES, moe_intermediate_size=12, num_experts=12, num_experts_per_tok=2)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=12)


@pytest.fixture(params=["qwen", "mixtral"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(QWEN) if request.param == "qwen" else MixtralForCausalLM(MIXTRAL)


def layout_for(model: PreTrainedModel, *, config: object = None) -> Layout:
    return stacked_experts(config, names="mixtral" if model.config.model_type == "mixtral" else "qwen")


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("with_config", [True, False])
def test_merges_and_splits_what_transformers_merges_and_splits(
    model: PreTrainedModel, with_config: bool, caplog: pytest.LogCaptureFixture
) -> None:
    merged = dict(model.state_dict())
    split = revert_weight_conversion(model, merged)
    assert len(split) > len(merged)
    layout = layout_for(model, config=model.config if with_config else None)
    assert_same(layout(split), merged)
    assert_same(layout.inverse(merged), split)
    assert not [record for record in caplog.records if record.name.startswith("hf_stream")]


def test_a_stream_merges_a_layer_as_soon_as_its_experts_have_come(model: PreTrainedModel) -> None:
    split = revert_weight_conversion(model, dict(model.state_dict()))
    stream = layout_for(model, config=model.config).stream(sorted(split.items()))
    names = [name for name, _ in stream]
    first, second = (names.index(f"model.layers.{layer}.mlp.experts.gate_up_proj") for layer in (0, 1))
    assert first < names.index("model.layers.0.self_attn.q_proj.weight") < second


@torch.no_grad()
def test_biases_are_merged_as_the_experts_of_transformers_take_them() -> None:
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    experts = GptOssExperts(config)
    shapes = {"gate": (12, 16), "up": (12, 16), "down": (16, 12)}
    split = {
        f"mlp.experts.{e}.{x}_proj.{kind}": torch.randn(shape if kind == "weight" else shape[:1])
        for e in range(4)
        for x, shape in shapes.items()
        for kind in ("weight", "bias")
    }
    layout = stacked_experts(config)
    merged = layout(split)
    wanted = {f"mlp.experts.{name}": tensor.shape for name, tensor in experts.state_dict().items()}
    # Their weights stand the other way round.
    assert {n: t.mT.shape if t.ndim == 3 else t.shape for n, t in merged.items()} == wanted
    gate_up = [torch.cat([split[f"mlp.experts.{e}.{x}_proj.bias"] for x in ("gate", "up")]) for e in range(4)]
    assert torch.equal(merged["mlp.experts.gate_up_proj_bias"], torch.stack(gate_up))
    assert_same(layout.inverse(merged), split)
    del split["mlp.experts.2.up_proj.bias"]
    with pytest.raises(LayoutError, match=r"'mlp\.experts\.2\.up_proj\.bias' missing"):
        layout(split)


def test_missing_experts_are_named(model: PreTrainedModel) -> None:
    split = revert_weight_conversion(model, dict(model.state_dict()))
    last = next(name for name in split if ".experts.11." in name)
    tensor = split.pop(last)
    with pytest.raises(LayoutError) as caught:
        layout_for(model, config=model.config)(split)
    assert f"'{last}' missing" in str(caught.value)
    split[last] = tensor
    middle = next(name for name in split if ".experts.5." in name)
    del split[middle]
    with pytest.raises(LayoutError) as caught:
        layout_for(model)(split)
    assert f"'{middle}' missing" in str(caught.value)


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(LayoutError, match="'qwen' or 'mixtral'"):
        stacked_experts(names="dbrx")
