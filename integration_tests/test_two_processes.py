"""Two processes that save to one directory, and one that reads it all the while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_stream

CHILDREN = str(Path(__file__).with_name("children.py"))


@pytest.mark.parametrize("exists", [False, True])
def test_a_reader_sees_one_checkpoint_or_the_other(tmp_path: Path, exists: bool) -> None:
    out = tmp_path / "out"
    if exists:
        hf_stream.save_checkpoint({f"t{n}": torch.zeros(1000) for n in range(6)}, out)
    command = [sys.executable, CHILDREN, "save_again_and_again", str(out)]
    enough = tmp_path / "enough"
    children = [subprocess.Popen([*command, value, "150", str(enough)]) for value in ("1", "2")]
    seen = set()
    while any(child.poll() is None for child in children):
        if seen >= {1.0, 2.0}:
            enough.touch()
        try:
            checkpoint = hf_stream.open_checkpoint(out)
        except hf_stream.CheckpointError:  # it is not there yet, or is being replaced
            continue
        assert len(checkpoint) == 6
        (value,) = {float(value) for tensor in checkpoint.values() for value in tensor.materialize().unique()}
        seen.add(value)
    assert [child.returncode for child in children] == [0, 0]
    assert seen >= {1.0, 2.0}
    enough.unlink()
    hf_stream.save_checkpoint({"x": torch.ones(1)}, out)
    assert list(tmp_path.rglob("*")) == [out, out / "model.safetensors"]
