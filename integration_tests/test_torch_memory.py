"""Files of torch.save several times as large as the memory promise: opened, converted and loaded within it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from memory_peaks import in_fresh_process
from safetensors import safe_open

pytestmark = pytest.mark.alone

# The default buffer, and Python objects.
LIMIT = 96 << 20

_PROGRAM = """
import os, sys
import hf_stream
from memory_peaks import peak_of

os.chdir(sys.argv[1])
hf_stream.convert("small.pt", "warm", progress=False)  # what is allocated once
print(peak_of(lambda: hf_stream.convert("large.pt", "out", progress=False)))
"""


@pytest.mark.parametrize("method", ["torch", zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_converting_takes_no_more_than_the_buffer(tmp_path: Path, method: str | int) -> None:
    large = torch.arange(1 << 26, dtype=torch.float32).view(1 << 13, 1 << 13)  # 256 MiB
    tensors = {"a": large, "turned": large.t(), "b": large + 1, "row": large[5]}
    torch.save({"w": torch.ones(100)}, tmp_path / "small.pt")
    torch.save({"model": tensors}, tmp_path / "large.pt")
    if method != "torch":
        with (
            zipfile.ZipFile(tmp_path / "large.pt") as source,
            zipfile.ZipFile(tmp_path / "packed.pt", "w", method, compresslevel=1) as packed,
        ):
            for name in source.namelist():
                with source.open(name) as old, packed.open(name, "w", force_zip64=True) as new:
                    while piece := old.read(1 << 20):
                        new.write(piece)
        (tmp_path / "packed.pt").replace(tmp_path / "large.pt")
    assert int(in_fresh_process(_PROGRAM, tmp_path)) <= LIMIT
    assert not _differs(tmp_path / "out", tensors)


def _differs(directory: Path, tensors: dict[str, torch.Tensor]) -> bool:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return any(not torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
