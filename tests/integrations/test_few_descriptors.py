"""Hundreds of shards in a process that may have 64 files open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from same_models import assert_same

import hf_stream

PROGRAM = """
import os, resource, sys
import torch, transformers
import hf_stream
from hf_stream import CheckpointWriter

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
os.chdir(sys.argv[1])
model = hf_stream.from_pretrained(transformers.AutoModelForCausalLM, "plain")
hf_stream.save_pretrained(model, "saved", max_shard_size=1)
hf_stream.convert("plain", "converted", max_shard_size=1, verify=True)
hf_stream.convert("plain", "cast", dtype=torch.bfloat16, max_shard_size=1)
assert not hf_stream.verify("plain", "saved")
checkpoint = hf_stream.open_checkpoint("plain")
hf_stream.save_checkpoint(checkpoint, "copied", max_shard_size=1)
hf_stream.save_checkpoint(hf_stream.open_checkpoint("copied"), "copied", max_shard_size=1)
with CheckpointWriter("written", checkpoint, max_shard_size=1) as writer:
    for name, tensor in checkpoint.items():
        writer.write(name, tensor)
hf_stream.save_nested({"model": dict(checkpoint), "step": 3}, "nested", max_shard_size=1)
state = hf_stream.load_nested("nested")
assert state["step"] == 3 and len(state["model"]) == len(checkpoint)
torch.save(hf_stream.materialize(checkpoint), "materialized")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=54,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path / "plain", max_shard_size=1)
    assert len(list(path.glob("plain/*.safetensors"))) > 480
    command = [sys.executable, "-c", PROGRAM, os.fspath(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_what_is_written_is_what_safetensors_reads(folder: Path) -> None:
    wanted = tensors_of(folder / "plain")
    for name in ("saved", "converted", "copied", "written"):
        found = tensors_of(folder / name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    cast = tensors_of(folder / "cast")
    assert all(torch.equal(cast[key], wanted[key].bfloat16()) for key in wanted)
    nested = hf_stream.load_nested(folder / "nested")["model"]
    materialized = torch.load(folder / "materialized")
    assert all(torch.equal(nested[key], wanted[key]) for key in wanted)
    assert all(torch.equal(materialized[key], wanted[key]) for key in wanted)


def test_the_model_is_the_one_of_plain_transformers(folder: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "plain")
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(folder / "saved"), plain)


def test_nothing_else_is_left_behind(folder: Path) -> None:
    names = {"plain", "saved", "converted", "cast", "copied", "written", "nested", "materialized"}
    assert set(os.listdir(folder)) == names
    for directory in names - {"materialized"}:
        assert not [name for name in os.listdir(folder / directory) if name.startswith(".")]
