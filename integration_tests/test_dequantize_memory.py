"""1.5 GB of FP8 blocks, two thirds of it one weight, become bfloat16 in little memory, on the command line as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory_peaks import in_fresh_process
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import hf_stream
from hf_stream.layouts import dequantize_fp8_blocks

pytestmark = pytest.mark.alone

MIB = 1 << 20
BUFFER = 16 * MIB
# One piece of a weight, in FP8 and in bfloat16, and what is in float32 of it.
PIECE = 60 * MIB
# Python objects, threads' stacks, and what the allocator keeps.
SLACK = 32 * MIB
WEIGHTS = {"large.weight": (1 << 15, 1 << 15)} | {f"layers.{n}.up.weight": (4096, 2048) for n in range(64)}

_CHILD = """
import sys
import hf_stream
from hf_stream.layouts import dequantize_fp8_blocks
from memory_peaks import peak_of

def run(source, target):
    layout = dequantize_fp8_blocks()
    hf_stream.convert(source, target, layout=layout, buffer_size=int(sys.argv[2]), max_shard_size="1GB", progress=False)

top = sys.argv[1]
run(f"{top}/small", f"{top}/small-out")
print(peak_of(lambda: run(f"{top}/large", f"{top}/out")))
"""


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scales are in the last shard, far from their weights."""
    path = tmp_path_factory.mktemp("fp8")
    bits = torch.randint(0, 127, (1 << 15,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pattern = bits.view(torch.float8_e4m3fn)
    for directory, weights in (("small", {"x.weight": (256, 256)}), ("large", WEIGHTS)):
        tensors = {name: pattern[:cols].expand(rows, cols) for name, (rows, cols) in weights.items()}
        for name, (rows, cols) in weights.items():
            seed = torch.Generator().manual_seed(rows + len(name))
            tensors[f"{name}_scale_inv"] = torch.rand(rows // 128, cols // 128, generator=seed)
        hf_stream.save_checkpoint(tensors, path / directory, max_shard_size="1GB")
        config = {"model_type": "deepseek_v3", "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
        (path / directory / "config.json").write_text(json.dumps(config))
    return path


def test_a_weight_larger_than_memory_would_do(top: Path) -> None:
    peak = int(in_fresh_process(_CHILD, top, BUFFER))
    assert peak < BUFFER + PIECE + SLACK
    # What the plan has said beforehand, without what Python and the allocator take.
    plan = hf_stream.plan_conversion(top / "large", layout=dequantize_fp8_blocks())
    assert plan.peak_nbytes(BUFFER) < BUFFER + PIECE
    assert sum(plan.nbytes_read().values()) == sum(t.nbytes for t in hf_stream.open_checkpoint(top / "large").values())

    source, out = hf_stream.open_checkpoint(top / "large"), hf_stream.open_checkpoint(top / "out")
    assert set(out) == set(WEIGHTS)
    for name in ("large.weight", "layers.63.up.weight"):
        for start in (0, source[name].shape[0] - 256):
            rows = slice(start, start + 256)
            scale = source[f"{name}_scale_inv"][start // 128 : start // 128 + 2]
            plain = Fp8Dequantize(None)._dequantize_one(
                source[name][rows].materialize(), scale.materialize(), torch.bfloat16
            )
            assert torch.equal(out[name][rows].materialize(), plain)


def test_as_a_command(top: Path) -> None:
    command = [sys.executable, "-m", "hf_stream", "convert", "-q", "--layout", "dequantize_fp8_blocks"]
    done = subprocess.run([*command, str(top / "large"), str(top / "command")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((top / "command" / "config.json").read_text()) == {
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
    }
    assert not hf_stream.verify(top / "command", top / "out")
