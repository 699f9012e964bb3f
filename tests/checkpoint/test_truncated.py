"""A file that somebody truncates while it is being loaded is an error with words, and no signal ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_stream

PROGRAM = """
import os, sys
import hf_stream

path, how = sys.argv[1:]
view, alias, early = {
    "whole": (lambda tensor: tensor, False, False),
    "cast": (lambda tensor: tensor.half(), False, False),
    "aliased": (lambda tensor: tensor, True, True),
    "transposed": (lambda tensor: tensor.t(), False, True),
}[how]

class Truncating:
    def update(self, n):
        os.truncate(path, 5000)

checkpoint = hf_stream.open_checkpoint(path)
if early:
    os.truncate(path, 5000)
try:
    loaded = hf_stream.materialize(
        {name: view(tensor) for name, tensor in checkpoint.items()}, alias=alias, progress=Truncating()
    )
except hf_stream.CopyError as error:
    print("CopyError", error)
"""


@pytest.mark.parametrize("how", ["whole", "cast", "aliased", "transposed"])
def test_it_is_an_error_with_words(tmp_path: Path, how: str) -> None:
    hf_stream.save_checkpoint({name: torch.ones(1500, 1500) for name in "abcd"}, tmp_path)
    path = tmp_path / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, os.fspath(path), how], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CopyError")
    assert "model.safetensors' ends " in done.stdout
