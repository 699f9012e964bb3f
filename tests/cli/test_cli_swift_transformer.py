"""What SwiftTransformer's converter does, on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from archives import partitions
from command_line import run
from part_files import DATA, manifest, sha256

PARTS = DATA / "opt_h8" / "input" / "parts2" / "reshard-model_part-*.pt"


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "float16"])
def test_the_command_of_its_readme(dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "opt-conv-fp16.pt"

    result = run("convert", PARTS, f"{out}/", "--layout", "swift-transformer", "--dtype", dtype)

    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}/\n"
    assert "in 59 files" in result.stderr
    assert "warning" not in result.stderr
    outputs = manifest("opt_h8")["outputs"]["fp32" if dtype == "fp32" else "fp16"]
    assert {name: sha256(t) for name, t in partitions(out.iterdir()).items()} == {
        name: facts["sha256"] for name, facts in outputs.items()
    }


def test_there_and_back_and_compared(tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    source = DATA / "opt_h8" / "hf"

    assert run("convert", source, there, "-l", "swift_transformer", "--verify", "-q").exit_code == 0
    assert run("verify", source, there, "-l", "swift_transformer", "-q").exit_code == 0
    assert run("convert", there, back, "-l", "swift_transformer", "--inverse", "-q").exit_code == 0

    assert sorted(os.listdir(back)) == ["config.json", "generation_config.json", "model.safetensors"]
    different = run("verify", source, back)
    assert "different: 1 tensor" in different.stderr
    assert different.stdout.startswith("'model.decoder.embed_positions.weight' differs first at [0, 0]")


def test_as_safetensors(tmp_path: Path) -> None:
    result = run("convert", PARTS, tmp_path / "out", "-l", "swift-transformer", "--format", "safetensors")

    assert result.exit_code == 0
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def test_a_plan_of_it() -> None:
    result = run("plan", PARTS, "-l", "swift-transformer", "--json")

    files = {entry["file"]: entry for entry in json.loads(result.stdout)["write"]}
    assert files.keys() == manifest("opt_h8")["outputs"]["fp16"].keys()
    assert files["decoder.layers.0.fc1.bias.tp_3.pt"]["tensors"] == [
        {"name": "decoder.layers.0.fc1.bias.tp_3", "dtype": "F16", "shape": [2], "nbytes": 4}
    ]


def test_warnings_are_told(tmp_path: Path) -> None:
    source = DATA / "llama2_gqa12_4" / "input" / "single.pt"

    result = run("convert", source, tmp_path / "out", "-l", "swift-transformer", "--dtype", "bf16")

    assert result.exit_code == 0
    assert "warning: SwiftTransformer loads float16 and float32 only" in result.stderr
    assert "warning: the heads do not divide by 8 (the partitions have 1, 1, 1, 1, 1, 1, 1, 13 of" in result.stderr


def test_shards_have_no_size_there(tmp_path: Path) -> None:
    result = run("convert", PARTS, tmp_path / "out", "-l", "swift-transformer", "--max-shard-size", "1MB")

    assert result.exit_code == 2
    assert "--max-shard-size has no meaning for TorchScript files" in result.stderr
    assert not (tmp_path / "out").exists()
