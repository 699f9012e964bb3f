"""A nested state of 500 MB is saved, opened, converted and loaded in little memory beyond the result."""

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

_CHILD = """
import sys
import torch, hf_stream
from memory_peaks import peak_of

def optimizer(count, side):
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(side, 1250)) for _ in range(count)])
    for group in adamw.param_groups:
        for p in group["params"]:
            averages = {name: torch.ones(side, 1250) for name in ("exp_avg", "exp_avg_sq")}
            adamw.state[p] = {"step": torch.tensor(1.0), **averages}
            p.data = torch.ones(1).expand(side, 1250)
    return adamw.state_dict()

work, top, buffer = sys.argv[1], sys.argv[2], int(sys.argv[3])

def prepare(size, state):
    source, target = f"{top}/{size}.safetensors", f"{top}/{size}.{work}.safetensors"
    options = {"buffer_size": buffer, "progress": False}
    return {
        "save": lambda: hf_stream.save_nested(state, source, **options),
        "open": lambda: hf_stream.open_nested(source),
        "convert": lambda: hf_stream.save_nested(hf_stream.open_nested(source), target, **options),
        "load": lambda: hf_stream.load_nested(source, **options),
    }[work]

state = lambda *sizes: optimizer(*sizes) if work == "save" else None
prepare("small", state(2, 10))()
print(peak_of(prepare("large", state(40, 1250))))
"""


def peak_of(work: str, top: Path) -> int:
    """Anonymous bytes above start at the worst moment, in a fresh process."""
    return int(in_fresh_process(_CHILD, work, top, BUFFER))


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nested")


def test_saving_takes_no_more_than_the_buffer(top: Path) -> None:
    peak = peak_of("save", top)
    assert (top / "large.safetensors").stat().st_size > STATE
    assert peak < BUFFER + SLACK


@pytest.mark.parametrize(
    ("work", "result", "limit"), [("open", 0, SLACK), ("convert", 0, BUFFER + SLACK), ("load", STATE, BUFFER + SLACK)]
)
def test_reading_takes_no_more_than_the_buffer_beyond_the_result(top: Path, work: str, result: int, limit: int) -> None:
    if not (top / "large.safetensors").exists():
        peak_of("save", top)
    assert peak_of(work, top) < result + limit
