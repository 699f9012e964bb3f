"""A nested state of 500 MB goes from a file of torch.save, or of OLMo, to safetensors in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_peaks import in_fresh_process

pytestmark = pytest.mark.alone

MIB = 1 << 20
BUFFER = 16 * MIB
# Python objects, threads' stacks, and what the allocator keeps.
SLACK = 16 * MIB
# An AdamW state of 40 layers, with exp_avg and exp_avg_sq of 6.25 MB each.
STATE = 500_000_000

_WRITE = """
import base64, pickle, sys
import torch
from safetensors.torch import save_file

def state(count, side):
    moments = lambda: {name: torch.randn(side, 1250) for name in ("exp_avg", "exp_avg_sq")}
    layers = {number: {"step": torch.tensor(1.0), **moments()} for number in range(count)}
    return {"state": layers, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": list(range(count))}]}

def entries(keys, value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from entries((*keys, key), item)
        return
    pickled = not isinstance(value, torch.Tensor)
    name = base64.urlsafe_b64encode(pickle.dumps((keys, pickled))).decode()
    yield name, torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if pickled else value

top = sys.argv[1]
for name, sizes in (("small", (2, 10)), ("large", (40, 1250))):
    made = state(*sizes)
    torch.save(made, f"{top}/{name}.pt")
    save_file(dict(entries((), made)), f"{top}/{name}-olmo.safetensors")
"""

_CONVERT = """
import sys
import hf_stream
from memory_peaks import peak_of

work, top, file, buffer = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
options = {"buffer_size": buffer, "progress": False}

def run(size):
    source = f"{top}/{size}{file}"
    if work == "load":
        return hf_stream.load_nested(source, **options)
    return hf_stream.convert(source, f"{top}/{size}-ours.safetensors", **options)

run("small")
print(peak_of(lambda: run("large")))
"""


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("nested")
    in_fresh_process(_WRITE, top)
    return top


@pytest.mark.parametrize("file", [".pt", "-olmo.safetensors"])
@pytest.mark.parametrize(("work", "result"), [("convert", 0), ("load", STATE)])
def test_a_nested_state_takes_no_more_than_the_buffer(top: Path, work: str, result: int, file: str) -> None:
    assert (top / f"large{file}").stat().st_size > STATE
    peak = int(in_fresh_process(_CONVERT, work, top, file, BUFFER))
    assert peak < result + BUFFER + SLACK
    if work == "convert":
        assert (top / "large-ours.safetensors").stat().st_size > STATE
