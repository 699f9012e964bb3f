"""A checkpoint and a file of layouts, for all commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CONFIG, llama
from safetensors.torch import save_file

LAYOUTS = """
from hf_stream.layouts import Layout, Rename

one = Layout([Rename("norm.weight", "middle.weight")])
two = Layout([Rename("middle.weight", "last.weight")])

def half(tensors):
    return {name: tensor[: tensor.shape[0] // 2] for name, tensor in tensors.items()}

def fails(tensors):
    return tensors["lm_head"]

def gives_list(tensors):
    return list(tensors)

def gives_shapes(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}

def from_config(config):
    return config["no such size"]

def ends(tensors):
    raise SystemExit(0)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    save_file(llama(), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "more").mkdir()
    (directory / "more" / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def layout_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(LAYOUTS)
    return file
