"""Files of torch.save several times as large as the memory promise: opened, converted and loaded within it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

# The default buffer, and Python objects.
LIMIT = 96 << 20

_PROGRAM = """
import sys, threading, time
import torch, hf_stream

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

hf_stream.convert(sys.argv[1], "warm", progress=False)  # what is allocated once
start = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
hf_stream.convert(sys.argv[2], "out", progress=False)
done.set()
thread.join()
print(peak - start)
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
    command = [sys.executable, "-c", _PROGRAM, "small.pt", "large.pt"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) <= LIMIT
    assert not _differs(tmp_path / "out", tensors)


def _differs(directory: Path, tensors: dict[str, torch.Tensor]) -> bool:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return any(not torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
