"""`save_pretrained` writes the files that plain transformers writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import hf_stream
from hf_stream.lazy import LazyTensor
from hf_stream.utils.sizes import parse_size

ARCHITECTURES = ["llama", "qwen3_moe", "gpt2", "opt", "t5", "phi3", "mixtral"]
SHARD = "12KB"


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("arguments", [{}, {"variant": "fp16"}, {"save_original_format": False}], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_file_and_all_that_goes_with_it_equal_plain_transformers(random_model, tmp_path, name, arguments):
    model = random_model(name)
    model.save_pretrained(tmp_path / "plain", **arguments)
    hf_stream.save_pretrained(model, tmp_path / "ours", **arguments)
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "t5", "phi3"])
def test_shards_and_index_equal_plain_transformers(random_model, saved, tmp_path, name, variant, reloaded):
    model = random_model(name)
    if reloaded:
        model = hf_stream.from_pretrained(type(model), saved(name))
    model.save_pretrained(tmp_path / "plain", max_shard_size=SHARD, variant=variant)
    hf_stream.save_pretrained(model, tmp_path / "ours", max_shard_size=SHARD, variant=variant)
    assert len(contents(tmp_path / "plain")) > 4
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_split_experts_in_shards_hold_the_same_tensors_and_keep_the_limit(random_model, tmp_path, name):
    model = random_model(name)
    model.save_pretrained(tmp_path / "plain", max_shard_size=SHARD)
    hf_stream.save_pretrained(model, tmp_path / "ours", max_shard_size=SHARD)
    assert not hf_stream.verify(tmp_path / "plain", tmp_path / "ours")
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    stored = {file.name: load_file(file) for file in (tmp_path / "ours").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    sizes = {file: sum(t.nbytes for t in tensors.values()) for file, tensors in stored.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= parse_size(SHARD) for file, size in sizes.items() if len(stored[file]) > 1)
    reloaded = type(model).from_pretrained(tmp_path / "ours")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reloaded.parameters(), strict=True))


def test_parameters_that_are_views_of_a_larger_storage_are_spread_as_transformers_does(random_model, tmp_path):
    model = transformers.LlamaForCausalLM(random_model("llama").config)
    for layer in model.model.layers:
        both = torch.randn(2, *layer.mlp.up_proj.weight.shape)
        layer.mlp.gate_proj.weight = torch.nn.Parameter(both[0])
        layer.mlp.up_proj.weight = torch.nn.Parameter(both[1])
        layer.self_attn.o_proj.weight = torch.nn.Parameter(torch.randn(32, 32).T)
    model.save_pretrained(tmp_path / "plain", max_shard_size=SHARD)
    hf_stream.save_pretrained(model, tmp_path / "ours", max_shard_size=SHARD)
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


def test_saving_over_the_files_the_model_was_loaded_from(saved, tmp_path):
    source = tmp_path / "model"
    hf_stream.convert(saved("llama"), source)
    expected = load_file(source / "model.safetensors")
    model = hf_stream.from_pretrained(transformers.LlamaForCausalLM, source)
    hf_stream.save_pretrained(model, source, max_shard_size=SHARD)
    assert not (source / "model.safetensors").exists()
    assert not hf_stream.verify(expected, source)
    hf_stream.save_pretrained(model, source)
    assert sorted(file.name for file in source.glob("*.safetensors*")) == ["model.safetensors"]
    assert not hf_stream.verify(expected, source)


def test_a_state_dict_is_saved_in_place_of_the_model_s(random_model, tmp_path):
    model = random_model("llama")
    state_dict = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "plain", state_dict=dict(state_dict))
    hf_stream.save_pretrained(model, tmp_path / "ours", state_dict=state_dict)
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


def test_texts_in_a_state_dict_are_left_out_and_other_objects_are_refused(random_model, tmp_path):
    model = random_model("llama")
    state_dict = {**model.state_dict(), "kind": "a text"}
    model.save_pretrained(tmp_path / "plain", state_dict=dict(state_dict))
    hf_stream.save_pretrained(model, tmp_path / "ours", state_dict=state_dict)
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")
    with pytest.raises(TypeError, match="state_dict=: 'kind' is a dict and no tensor"):
        hf_stream.save_pretrained(model, tmp_path / "none", state_dict={**state_dict, "kind": {}})
    assert not (tmp_path / "none").exists()


def test_other_processes_than_the_main_one_write_nothing(random_model, tmp_path):
    hf_stream.save_pretrained(random_model("llama"), tmp_path / "ours", is_main_process=False)
    assert list(tmp_path.rglob("*")) == [tmp_path / "ours"]


def test_a_failing_layout_leaves_the_old_checkpoint_alone(random_model, tmp_path):
    model = random_model("llama")
    hf_stream.save_pretrained(model, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError):
        hf_stream.save_pretrained(model, tmp_path, layout=lambda _: 1 / 0)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_lazies_are_saved_as_what_they_show_and_tied_ones_once(random_model, saved, tmp_path, name):
    source = hf_stream.from_pretrained(type(random_model(name)), saved(name))
    lazies = {key: LazyTensor.from_tensor(tensor) for key, tensor in source.state_dict(keep_vars=True).items()}
    source.save_pretrained(tmp_path / "plain", max_shard_size=SHARD)
    hf_stream.save_pretrained(source, tmp_path / "ours", state_dict=lazies, max_shard_size=SHARD)
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


def test_a_model_of_lazies_is_saved(saved, tmp_path):
    lazies = dict(hf_stream.open_checkpoint(saved("qwen3_moe")))
    config = transformers.AutoConfig.from_pretrained(saved("qwen3_moe"))
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=lazies)
    hf_stream.save_pretrained(model, tmp_path / "ours")
    assert not hf_stream.verify(saved("qwen3_moe"), tmp_path / "ours")
