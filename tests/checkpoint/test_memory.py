"""Anonymous memory stays within the buffer, whatever the size of the checkpoint. Sampled in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_peaks import in_fresh_process

MIB = 1 << 20
BUFFER = 16 * MIB
# Python objects, threads' stacks, and what the allocator keeps.
SLACK = 16 * MIB

_CHILD = """
import sys
import torch, hf_stream
from memory_peaks import peak_of

work, top, buffer = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"buffer_size": buffer, "max_shard_size": "40MB", "progress": False}
layout = lambda t: {name: tensor.T for name, tensor in t.items()}

def convert(source, target, **more):
    return lambda: hf_stream.convert(f"{top}/{source}", f"{top}/{target}", **options, **more)

def save(source, target):
    tensors = {name: tensor.materialize() for name, tensor in hf_stream.open_checkpoint(f"{top}/{source}").items()}
    return lambda: hf_stream.save_checkpoint({n: t.T for n, t in tensors.items()}, f"{top}/{target}", **options)

works = {
    "plain": lambda source: convert(source, source + ".plain"),
    "transposed": lambda source: convert(source, source + ".transposed", layout=layout),
    "cast": lambda source: convert(source, source + ".cast", dtype=torch.float32),
    "save": lambda source: save(source, source + ".save"),
    "verify": lambda source: lambda: hf_stream.verify(f"{top}/{source}", f"{top}/{source}", buffer_size=buffer),
}
works[work]("small")()
print(peak_of(works[work]("large")))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    import hf_stream

    top = tmp_path_factory.mktemp("memory")
    for name, count in (("small", 2), ("large", 24)):
        side = 2000 if name == "large" else 600
        tensors = {f"t{n}": torch.full((side, side + 48), n, dtype=torch.bfloat16) for n in range(count)}
        hf_stream.save_checkpoint(tensors, top / name, max_shard_size="40MB")
    return top


@pytest.mark.parametrize("work", ["plain", "transposed", "cast", "save", "verify"])
def test_peak_of_anonymous_memory(checkpoints: Path, work: str) -> None:
    peak = int(in_fresh_process(_CHILD, work, checkpoints, BUFFER))
    assert peak < BUFFER + SLACK, f"{peak / MIB:.0f} MiB for {24 * 2000 * 2048 * 2 / MIB:.0f} MiB of tensors"
