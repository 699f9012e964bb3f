"""Saving a model that lies in memory: transformers, hf_stream, and cp -r of a checkpoint with the same tensors.

python integration_tests/benchmarks/save.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import checkpoints
import harness
import models
from harness import Case, Contender, Work


def with_transformers(source: Path, target: Path) -> Work:
    """Save with plain transformers."""
    model = models.load_into_memory(source)

    def work() -> Path:
        model.save_pretrained(target, max_shard_size=checkpoints.MAX_SHARD_NBYTES)
        return target

    return work


def with_hf_stream(source: Path, target: Path) -> Work:
    """Save with hf_stream."""
    import hf_stream

    model = models.load_into_memory(source)

    def work() -> Path:
        hf_stream.save_pretrained(model, target, max_shard_size=checkpoints.MAX_SHARD_NBYTES)
        return target

    return work


def with_cp(source: Path, target: Path) -> Work:
    """Copy the files; memory is that of the process which waits for cp."""

    def work() -> Path:
        subprocess.run(["cp", "-r", source, target], check=True)
        return target

    return work


CONTENDERS = {
    "transformers": Contender(with_transformers),
    "hf_stream": Contender(with_hf_stream),
    "cp": Contender(with_cp),
}
PEERS = ["transformers", "cp"]
CASES = {
    "experts": Case("Save Qwen3-MoE, splitting experts", "qwen3-moe", CONTENDERS, PEERS),
    "plain": Case("Save Llama, nothing to convert", "llama", CONTENDERS, PEERS),
}

if __name__ == "__main__":
    harness.main(CASES)
