from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers
from file_facts import pwned
from same_models import assert_same
from torch_files import FOLDER

import hf_stream
from hf_stream.errors import FormatError
from hf_stream.lazy import LazyTensor


def _saved_as_bin(model: transformers.PreTrainedModel, directory: Path, shards: int = 1, **options: bool) -> Path:
    """What transformers wrote until it turned to safetensors."""
    model.config.save_pretrained(directory)
    state, file = model.state_dict(), "pytorch_model.bin"
    if shards == 1:
        torch.save(state, directory / file, **options)
        return directory
    weight_map = {name: f"pytorch_model-{n % shards + 1:05d}-of-{shards:05d}.bin" for n, name in enumerate(state)}
    for part in set(weight_map.values()):
        torch.save({name: state[name] for name in state if weight_map[name] == part}, directory / part, **options)
    (directory / f"{file}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "t5"])
@pytest.mark.parametrize("shards", [1, 3])
def test_directories_of_bin_files_alone_load_as_in_transformers(random_model, tmp_path, name, shards) -> None:
    path = _saved_as_bin(random_model(name), tmp_path, shards)
    kind = type(random_model(name))
    for options in ({}, {"dtype": torch.bfloat16}):
        assert_same(hf_stream.from_pretrained(kind, path, **options), kind.from_pretrained(path, **options))


def test_they_are_streamed_and_not_loaded_by_torch(random_model, tmp_path, monkeypatch) -> None:
    path = _saved_as_bin(random_model("llama"), tmp_path)
    seen = []
    load = transformers.PreTrainedModel._load_pretrained_model

    def noting(model, state_dict, *args, **kwargs):
        seen.extend(state_dict.values())
        return load(model, state_dict, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", staticmethod(noting))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("loaded by torch"))
    hf_stream.from_pretrained(transformers.LlamaForCausalLM, path)
    assert seen
    assert all(isinstance(tensor, LazyTensor) for tensor in seen)


def test_files_of_the_old_format_load(random_model, tmp_path) -> None:
    path = _saved_as_bin(random_model("llama"), tmp_path, _use_new_zipfile_serialization=False)
    ours = hf_stream.from_pretrained(transformers.LlamaForCausalLM, path)
    assert_same(ours, transformers.LlamaForCausalLM.from_pretrained(path))


def test_parameters_and_tied_weights_in_bin_files(random_model, tmp_path) -> None:
    model = random_model("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save(dict(model.named_parameters(remove_duplicate=False)), tmp_path / "pytorch_model.bin")
    ours = hf_stream.from_pretrained(transformers.GPT2LMHeadModel, tmp_path)
    assert ours.lm_head.weight is ours.transformer.wte.weight
    assert_same(ours, transformers.GPT2LMHeadModel.from_pretrained(tmp_path))


def test_the_dtype_is_found_in_the_file_without_running_it(random_model, tmp_path) -> None:
    config = random_model("llama").config.to_dict()
    config["dtype"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    # A copy: the model is shared by all tests.
    torch.save(deepcopy(random_model("llama")).half().state_dict(), tmp_path / "pytorch_model.bin")
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert plain.dtype == torch.float16
    assert_same(hf_stream.from_pretrained(transformers.LlamaForCausalLM, tmp_path, dtype="auto"), plain)
    (tmp_path / "pytorch_model.bin").write_bytes((FOLDER / "hostile/open_after_tensor.pt").read_bytes())
    with pytest.raises(FormatError):
        hf_stream.from_pretrained(transformers.LlamaForCausalLM, tmp_path, dtype="auto", weights_only=False)
    assert not pwned()
    (tmp_path / "pytorch_model.bin").write_bytes((FOLDER / "bad/byteorder_big.pt").read_bytes())
    with pytest.raises(FormatError, match="byteorder"):
        hf_stream.from_pretrained(transformers.LlamaForCausalLM, tmp_path, dtype="auto")
    assert transformers.modeling_utils.load_state_dict.__module__ == "transformers.modeling_utils"


@pytest.mark.parametrize("name", ["hostile/open_after_tensor.pt", "hostile/legacy_open.pt", "bad/record_too_short.pt"])
def test_hostile_and_damaged_files_are_refused(random_model, tmp_path, name) -> None:
    random_model("llama").config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes((FOLDER / name).read_bytes())
    with pytest.raises(FormatError, match=re.escape("pytorch_model.bin")):
        hf_stream.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    assert not pwned()


def test_converted_to_safetensors_plain_transformers_loads_the_same_model(random_model, tmp_path) -> None:
    for name in ("llama", "gpt2"):
        path = _saved_as_bin(random_model(name), tmp_path / name, 2)
        kind = type(random_model(name))
        hf_stream.convert(path, tmp_path / name / "out", max_shard_size="12KB")
        assert (tmp_path / name / "out" / "model.safetensors.index.json").exists()
        assert_same(kind.from_pretrained(tmp_path / name / "out"), kind.from_pretrained(path))
