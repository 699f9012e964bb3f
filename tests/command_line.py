"""The command line as tests call it, and a small checkpoint for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from hf_stream.cli import main

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "float32"}


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


def process(*args: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_stream.cli", *map(str, args)]
    run_it: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    return run_it(command, **{"capture_output": True, "text": True, "timeout": 120, **options})


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
