"""Saving a model that lies in memory: transformers, hf_stream, and cp -r of a checkpoint with the same tensors.

By default hf_stream waits until all is on the disk, as `cp -r` and `sync` do; transformers and `cp -r` alone do not,
and are to be compared with `durable=False`. Besides: saving one whose weights are offloaded to disk, by transformers
and hf_stream.

    python integration_tests/benchmarks/save.py
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import checkpoints
import harness
import models
import torch
from harness import Case, Contender, Prepare, Work


def with_transformers(source: Path, target: Path) -> Work:
    """Save with plain transformers."""
    model = models.load_into_memory(source)

    def work() -> Path:
        model.save_pretrained(target, max_shard_size=checkpoints.MAX_SHARD_NBYTES)
        return target

    return work


def with_hf_stream(durable: bool) -> Prepare:
    """Save with hf_stream."""

    def prepare(source: Path, target: Path) -> Work:
        import hf_stream

        model = models.load_into_memory(source)

        def work() -> Path:
            hf_stream.save_pretrained(model, target, max_shard_size=checkpoints.MAX_SHARD_NBYTES, durable=durable)
            return target

        return work

    return prepare


def offloaded(streaming: bool) -> Prepare:
    """Save a model whose weights are all on disk."""

    def prepare(source: Path, target: Path) -> Work:
        import hf_stream

        folder = tempfile.TemporaryDirectory(dir=target.parent)
        cls = models.class_of(source)
        model = cls.from_pretrained(source, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=folder.name)
        save = hf_stream.save_pretrained if streaming else cls.save_pretrained

        # The folder is removed with the work.
        def work(_folder: object = folder) -> Path:
            save(model, target, max_shard_size=checkpoints.MAX_SHARD_NBYTES)
            return target

        return work

    return prepare


def with_cp(source: Path, target: Path) -> Work:
    """Copy the files; memory is that of the process which waits for cp."""

    def work() -> Path:
        subprocess.run(["cp", "-r", source, target], check=True)
        return target

    return work


def with_cp_and_sync(source: Path, target: Path) -> Work:
    """Copy the files, and wait until they are on the disk."""
    copy = with_cp(source, target)

    def work() -> Path:
        copied = copy()
        subprocess.run(["sync", "-f", target], check=True)
        assert isinstance(copied, Path)
        return copied

    return work


CONTENDERS = {
    "transformers": Contender(with_transformers),
    "hf_stream": Contender(with_hf_stream(durable=True)),
    "hf_stream, durable=False": Contender(with_hf_stream(durable=False)),
    "cp": Contender(with_cp),
    "cp, sync": Contender(with_cp_and_sync),
}
OFFLOADED = {
    "transformers": Contender(offloaded(streaming=False), "accelerate"),
    "hf_stream": Contender(offloaded(streaming=True), "accelerate"),
}
PEERS = ["transformers", "cp", "cp, sync"]
CASES = {
    "experts": Case("Save Qwen3-MoE, splitting experts", "qwen3-moe", CONTENDERS, PEERS),
    "plain": Case("Save Llama, nothing to convert", "llama", CONTENDERS, PEERS),
    "offloaded": Case("Save Qwen3-MoE, all on disk", "qwen3-moe", OFFLOADED, PEERS),
}

if __name__ == "__main__":
    harness.main(CASES)
