"""A base model loaded into a model that peft has wrapped: as if it had been loaded first and wrapped then."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from samples import same_bits
from transformers import PreTrainedModel

import hf_stream
from hf_stream.integrations.peft import load_base_model

_KINDS = ("UserWarning", "RuntimeWarning", "FutureWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in _KINDS]

Saved = Callable[..., Path]
RandomModel = Callable[[str], PreTrainedModel]

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, tuple[str, peft.PeftConfig]] = {
    "llama": ("llama", peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])),
    "dora": ("llama", peft.LoraConfig(target_modules=["down_proj"], use_dora=True)),
    "tokens": ("llama", peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5])),
    "conv1d": ("gpt2", peft.LoraConfig(target_modules=["c_attn", "wte"])),
    "t5": ("t5", peft.LoraConfig(target_modules=["q", "wo"])),
    "experts": ("qwen3_moe", peft.LoraConfig(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "experts by old names": ("mixtral", peft.LoraConfig(target_modules=["w1", "w2", "w3"])),
    "ia3": ("llama", peft.IA3Config(target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"])),
    "loha": ("llama", peft.LoHaConfig(target_modules=["k_proj"])),
    "norms": ("llama", peft.LNTuningConfig(target_modules=["norm"])),
}


def wrapped(base: Any, config: peft.PeftConfig, second: peft.PeftConfig | None) -> peft.PeftModel:
    model = peft.get_peft_model(base, copy.deepcopy(config))
    if second is not None:
        model.add_adapter("second", copy.deepcopy(second))
    return model


def on_meta(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    with torch.device("meta"):
        return type(model)._from_config(copy.deepcopy(model.config), dtype=dtype or model.dtype)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers, by every name."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def assert_same(got: peft.PeftModel, expected: peft.PeftModel) -> None:
    a, b = tensors_of(got), tensors_of(expected)
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []
    assert [name for name in a if a[name].requires_grad != b[name].requires_grad] == []
    assert ties(a) == ties(b)
    assert got.active_adapters == expected.active_adapters


def ties(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    return {frozenset(name for name in tensors if tensors[name] is tensor) for tensor in tensors.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ADAPTERS)
def test_a_model_without_memory_becomes_the_one_that_was_loaded_first(
    random_model: RandomModel, saved: Saved, case: str, dtype: torch.dtype
) -> None:
    name, config = ADAPTERS[case]
    second = peft.LoraConfig(target_modules=["v_proj"]) if case == "llama" else None
    plain = type(random_model(name)).from_pretrained(saved(name), dtype=dtype)
    torch.manual_seed(7)
    expected = wrapped(plain, config, second)

    got = wrapped(on_meta(random_model(name), dtype), config, second)
    assert all(tensor.is_meta for tensor in got.parameters())
    torch.manual_seed(7)
    load_base_model(got, saved(name, sharded=True))
    assert_same(got, expected)


def test_what_is_there_is_filled_in_place_and_adapters_are_left_alone(random_model: RandomModel, saved: Saved) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(type(random_model("llama"))(random_model("llama").config), config)
    before = tensors_of(model)
    adapter = {name: t.detach().clone() for name, t in before.items() if "lora_" in name or "modules_to_save" in name}
    load_base_model(model, saved("llama"))
    after = tensors_of(model)
    assert all(after[name] is before[name] for name in before)
    assert all(same_bits(after[name], tensor) for name, tensor in adapter.items())
    expected = peft.get_peft_model(copy.deepcopy(random_model("llama")), copy.deepcopy(config))
    for name, tensor in tensors_of(expected).items():
        assert name in adapter or same_bits(after[name], tensor)


def test_an_adapter_can_be_loaded_afterwards(random_model: RandomModel, saved: Saved, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"])
    trained = peft.get_peft_model(copy.deepcopy(random_model("llama")), copy.deepcopy(config))
    for parameter in trained.parameters():
        parameter.data.normal_()
    trained.save_pretrained(tmp_path / "adapter")
    expected = peft.PeftModel.from_pretrained(
        type(random_model("llama")).from_pretrained(saved("llama")), tmp_path / "adapter", is_trainable=True
    )
    got = peft.get_peft_model(on_meta(random_model("llama")), peft.PeftConfig.from_pretrained(tmp_path / "adapter"))
    load_base_model(got, saved("llama"))
    got.load_adapter(tmp_path / "adapter", "default", is_trainable=True)
    a, b = tensors_of(got), tensors_of(expected)
    assert all(same_bits(a[name], b[name]) for name in b)


def test_a_layout_and_a_device_and_arguments_of_transformers_are_heeded(
    random_model: RandomModel, saved: Saved, tmp_path: Path
) -> None:
    renamed = hf_stream.Layout([hf_stream.layouts.Rename("model.{rest:+}", "old.{rest}")])
    hf_stream.convert(saved("llama"), tmp_path / "repo" / "sub", layout=renamed)
    model = peft.get_peft_model(on_meta(random_model("llama")), peft.LoraConfig(target_modules=["q_proj"]))
    load_base_model(model, tmp_path / "repo", layout=renamed.inverse, subfolder="sub", device="cpu")
    expected = random_model("llama").state_dict()
    got = hf_stream.layouts.lora_base_layers(model).inverse(model.state_dict())
    assert all(same_bits(got[name], tensor) for name, tensor in expected.items())


def test_a_head_of_the_adapter_may_be_missing(random_model: RandomModel, saved: Saved) -> None:
    config = copy.deepcopy(random_model("llama").config)
    config.pad_token_id, config.num_labels = 0, 3
    with torch.device("meta"):
        base = transformers.LlamaForSequenceClassification(config)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    with pytest.raises(hf_stream.CheckpointError, match=r"1 tensors do not fit.*'lm_head.weight' is not in the model"):
        load_base_model(model, saved("llama"))
    assert next(model.parameters()).is_meta
    load_base_model(model, saved("llama"), strict=False)
    assert same_bits(model.base_model.model.model.norm.weight, random_model("llama").model.norm.weight)
    head = model.base_model.model.score
    assert same_bits(head.modules_to_save.default.weight, head.original_module.weight)


def test_missing_and_unexpected_names_are_errors(random_model: RandomModel, saved: Saved, tmp_path: Path) -> None:
    change = hf_stream.Layout([hf_stream.layouts.Rename("model.norm.weight", "model.nothing.weight")])
    hf_stream.convert(saved("llama"), tmp_path / "changed", layout=change)
    model = peft.get_peft_model(copy.deepcopy(random_model("llama")), peft.LoraConfig(target_modules=["q_proj"]))
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    message = "'model.norm.weight' is missing; 'model.nothing.weight' is not in the model"
    with pytest.raises(hf_stream.CheckpointError, match=re.escape(message)):
        load_base_model(model, tmp_path / "changed")
    assert all(same_bits(tensor, before[name]) for name, tensor in tensors_of(model).items())


def test_a_model_that_was_changed_after_it_was_built_is_refused(random_model: RandomModel, saved: Saved) -> None:
    base = copy.deepcopy(random_model("llama"))
    base.model.norm.extra = torch.nn.Parameter(torch.ones(2))
    base.model.embed_tokens = torch.nn.Embedding(99, 32)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    message = r"wants shape \[99, 32\], its config gives \[96, 32\]; .*extra' has no counterpart"
    with pytest.raises(hf_stream.CheckpointError, match=message):
        load_base_model(model, saved("llama"))


def test_what_cannot_be_loaded_is_refused(random_model: RandomModel, saved: Saved) -> None:
    other = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(hf_stream.CheckpointError, match=r"no model of transformers; use hf_stream\.load_into"):
        load_base_model(other, "anywhere")
    model = peft.get_peft_model(on_meta(random_model("llama")), peft.VeraConfig(target_modules=["q_proj"]))
    with pytest.raises(hf_stream.CheckpointError, match=r"pass device="):
        load_base_model(model, saved("llama"), device_map="auto")
    with pytest.raises(hf_stream.CheckpointError, match=r"adapter 'default' .*cannot be created anew"):
        load_base_model(model, saved("llama"))
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(on_meta(random_model("llama")), prompt)
    with pytest.raises(hf_stream.CheckpointError, match=r"prompt_encoder.*are on the meta device still"):
        load_base_model(model, saved("llama"))
