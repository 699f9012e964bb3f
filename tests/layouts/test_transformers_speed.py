"""Transformers does little work per key in the block, the same work in the end, and is as before afterwards."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import transformers
from programs import bits
from transformers import core_model_loading
from transformers.core_model_loading import WeightConverter, WeightRenaming, revert_weight_conversion

import hf_stream
from hf_stream.layouts.transformers_speed import little_work_per_key


@pytest.fixture(scope="module")
def model():
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=16,
    )
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.fixture
def calls(monkeypatch):
    """How often a pattern is compiled and a converter copied."""
    counts = {"compile": 0, "deepcopy": 0}
    compile_, deepcopy = re._compiler.compile, WeightConverter.__reduce_ex__
    monkeypatch.setattr(
        re._compiler, "compile", lambda *a: [compile_(*a), counts.update(compile=counts["compile"] + 1)][0]
    )
    monkeypatch.setattr(
        WeightConverter,
        "__reduce_ex__",
        lambda self, version: [deepcopy(self, version), counts.update(deepcopy=counts["deepcopy"] + 1)][0],
    )
    return counts


def test_loading_compiles_and_copies_once_for_a_parameter_not_for_a_key(model, tmp_path, calls):
    model.save_pretrained(tmp_path)
    found = []
    for load in (transformers.Qwen3MoeForCausalLM.from_pretrained, _streaming):
        re.purge()
        calls.update(compile=0, deepcopy=0)
        load(tmp_path)
        found.append(dict(calls))
    # Two merged parameters in each of two layers, of 16 or 32 tensors; each of two converters leaves a copy over.
    assert found[0]["deepcopy"] >= 96
    assert found[1]["deepcopy"] < 12
    assert found[1]["compile"] < found[0]["compile"] - 20


def _streaming(path):
    return hf_stream.from_pretrained(transformers.Qwen3MoeForCausalLM, path)


def test_saving_compiles_no_pattern_for_a_key(model, calls):
    re.purge()
    with little_work_per_key():
        revert_weight_conversion(model, model.state_dict())
        first = calls["compile"]
        revert_weight_conversion(model, model.state_dict())
    assert calls["compile"] == first
    revert_weight_conversion(model, model.state_dict())
    assert calls["compile"] > first + len(model.state_dict()) // 2


def test_what_transformers_makes_of_tensors_is_the_same(model):
    plain = revert_weight_conversion(model, model.state_dict())
    with little_work_per_key():
        quick = revert_weight_conversion(model, model.state_dict())
    assert list(quick) == list(plain)
    assert all(bits(quick[name]) == bits(plain[name]) for name in plain)


def test_patterns_made_in_the_block_match_copy_and_pickle_after_it():
    with little_work_per_key():
        renaming = WeightRenaming(r"^old\.(\w+)", r"new.\1")
    for one in (renaming, copy.deepcopy(renaming), pickle.loads(pickle.dumps(renaming))):
        assert one.rename_source_key("old.weight") == ("new.weight", renaming.source_patterns[0])
        assert one.rename_source_key("other.weight") == ("other.weight", None)


def test_a_copy_that_has_collected_something_is_given_to_nobody_else():
    converter = WeightConverter(["a", "b"], "c", [core_model_loading.Concatenate(0)])
    with little_work_per_key():
        first = core_model_loading.deepcopy(converter)
        assert core_model_loading.deepcopy(converter) is first
        first.add_tensor("c", "a", "a", torch.ones(1))
        second = core_model_loading.deepcopy(converter)
        first.materialize_tensors()
        assert core_model_loading.deepcopy(converter) is second
        assert second is not first
        assert not second.collected_tensors
        assert core_model_loading.deepcopy([1]) is not core_model_loading.deepcopy([1])
    assert not converter.collected_tensors


def test_transformers_is_as_before_after_overlapping_blocks_and_errors():
    with little_work_per_key():
        with pytest.raises(ZeroDivisionError), little_work_per_key():
            1 / 0  # noqa: B018
        assert core_model_loading.re is not re
    assert core_model_loading.re is re
    assert core_model_loading.deepcopy is copy.deepcopy
