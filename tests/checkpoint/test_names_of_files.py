"""What is converted keeps the names that it has, and the directory loads as the source does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import files_of, same_bits
from transformers import LlamaConfig, LlamaForCausalLM

import hf_stream
from hf_stream.errors import CheckpointError
from hf_stream.layouts import Layout, Rename

TENSORS = {name: torch.randn(8, 8) for name in ("a.weight", "b.weight", "c.weight")}


def _save(path: Path, *names: str) -> None:
    path.mkdir(exist_ok=True)
    for name in names:
        if name.endswith(".safetensors"):
            save_file(TENSORS, path / name)
        else:
            torch.save(TENSORS, path / name)


@pytest.mark.parametrize(
    ("source", "single", "sharded"),
    [
        ("model.safetensors", "model.safetensors", "model-00001-of-00003.safetensors"),
        ("adapter_model.safetensors", "adapter_model.safetensors", "adapter_model-00001-of-00003.safetensors"),
        ("adapter_model.bin", "adapter_model.safetensors", "adapter_model-00001-of-00003.safetensors"),
        (
            "diffusion_pytorch_model.safetensors",
            "diffusion_pytorch_model.safetensors",
            "diffusion_pytorch_model-00001-of-00003.safetensors",
        ),
        (
            "diffusion_pytorch_model.bin",
            "diffusion_pytorch_model.safetensors",
            "diffusion_pytorch_model-00001-of-00003.safetensors",
        ),
        (
            "diffusion_pytorch_model.fp16.safetensors",
            "diffusion_pytorch_model.fp16.safetensors",
            "diffusion_pytorch_model.fp16-00001-of-00003.safetensors",
        ),
        ("model.fp16.safetensors", "model.fp16.safetensors", "model.fp16-00001-of-00003.safetensors"),
        ("pytorch_model.bin", "model.safetensors", "model-00001-of-00003.safetensors"),
        ("v1.5-pruned.safetensors", "v1.5-pruned.safetensors", "v1.5-pruned-00001-of-00003.safetensors"),
        ("model.pt", "model.safetensors", "model-00001-of-00003.safetensors"),
    ],
)
def test_weights_of_a_directory_keep_their_name(tmp_path: Path, source: str, single: str, sharded: str) -> None:
    _save(tmp_path / "in", source)
    hf_stream.convert(tmp_path / "in", tmp_path / "out", dtype=torch.bfloat16, verify=True)
    assert os.listdir(tmp_path / "out") == [single]
    found = load_file(tmp_path / "out" / single)
    assert all(same_bits(found[name], tensor.bfloat16()) for name, tensor in TENSORS.items())

    hf_stream.convert(tmp_path / "out", tmp_path / "shards", max_shard_size=1, verify=True)
    names = sorted(os.listdir(tmp_path / "shards"))
    assert sharded in names
    assert len(names) == 4
    assert not hf_stream.verify(tmp_path / "shards", tmp_path / "out")
    hf_stream.convert(tmp_path / "shards", tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards_and_index_of_a_variant_are_called_as_transformers_calls_them(tmp_path: Path, variant: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    for name, size in (("single", "5GB"), ("shards", 2000)):
        model.save_pretrained(tmp_path / name, variant=variant, max_shard_size=size)
    hf_stream.convert(tmp_path / "single", tmp_path / "out", max_shard_size=2000)
    assert set(files_of(tmp_path / "out")) == set(files_of(tmp_path / "shards"))
    LlamaForCausalLM.from_pretrained(tmp_path / "out", variant=variant)
    hf_stream.convert(tmp_path / "shards", tmp_path / "one")
    assert set(files_of(tmp_path / "one")) == set(files_of(tmp_path / "single"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_loads_as_before(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "in")
    hf_stream.convert(tmp_path / "in", tmp_path / "out", dtype=torch.bfloat16)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (tmp_path / "in").iterdir()}
    wanted = {name: tensor.bfloat16() for name, tensor in peft.get_peft_model_state_dict(adapted).items()}
    loaded = peft.PeftModel.from_pretrained(adapted.unload(), tmp_path / "out", autocast_adapter_dtype=False)
    found = peft.get_peft_model_state_dict(loaded)
    assert all(torch.equal(found[name].float(), wanted[name].float()) for name in wanted)
    # Beside a model, which stays.
    base.save_pretrained(tmp_path / "both")
    hf_stream.convert(tmp_path / "in", tmp_path / "both")
    assert {"model.safetensors", "adapter_model.safetensors"} <= {p.name for p in (tmp_path / "both").iterdir()}


def test_of_several_variants_the_plain_one_is_taken_and_the_others_are_named(tmp_path, caplog) -> None:
    plain = "diffusion_pytorch_model.safetensors"
    others = ["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin", "model.fp16.safetensors"]
    _save(tmp_path / "in", plain, *others)
    hf_stream.convert(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [plain]
    assert "3 other weight files are not converted" in caplog.text
    (tmp_path / "in" / plain).unlink()
    (tmp_path / "in" / others[1]).unlink()
    with pytest.raises(CheckpointError, match=r"is in two files.*pass the path of one of them"):
        hf_stream.convert(tmp_path / "in", tmp_path / "out")
    hf_stream.convert(tmp_path / "in" / others[0], tmp_path / "fp16")
    assert os.listdir(tmp_path / "fp16") == [others[0]]


def test_names_that_no_library_knows_are_not_kept_for_other_tensors(tmp_path: Path) -> None:
    _save(tmp_path / "in", "weights.safetensors")
    layout = Layout([Rename("{x}.weight", "{x}.w")])
    hf_stream.convert(tmp_path / "in", tmp_path / "out", layout=layout)
    hf_stream.convert(tmp_path / "in/weights.safetensors", tmp_path / "one")
    for name in ("out", "one"):
        assert os.listdir(tmp_path / name) == ["model.safetensors"]
    # What would be read in the place of the new weights goes.
    hf_stream.convert(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["weights.safetensors"]


def test_several_files_without_an_index_become_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / "in" / f"{name}.safetensors")
    hf_stream.convert(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def test_stale_shards_of_the_same_name_go(tmp_path: Path) -> None:
    _save(tmp_path / "in", "adapter_model.safetensors")
    for size in (1, "1GB", 1):
        hf_stream.convert(tmp_path / "in", tmp_path / "out", max_shard_size=size)
        names = set(os.listdir(tmp_path / "out"))
        assert len(names) == (4 if size == 1 else 1)
    index = json.loads((tmp_path / "out/adapter_model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == names - {"adapter_model.safetensors.index.json"}
