"""The command line as tests call it, and a small checkpoint for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from hf_stream.cli import main

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "float32"}


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


def process(
    *args: str | bytes | Path, stdout: int | IO[bytes] = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    # Python buffers stdout as it does by default, wherever the tests run.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-m", "hf_stream", *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=inherited | environment,
        timeout=120,
    )


def llama(layers: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(32, 16), "norm.weight": torch.randn(16)}
    for i in range(layers):
        for name, rows in (("q", 16), ("k", 8), ("v", 8)):
            tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"] = torch.randn(rows, 16)
    return tensors


def load(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors as safetensors itself reads them."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
