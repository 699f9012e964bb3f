"""Packing query, key and value of a Llama checkpoint into one tensor, from files to files.

    python integration_tests/benchmarks/convert.py

Contenders: hf_stream.convert, d9d's streaming reader and writer, loading everything and torch.cat, and, as the bound
for moving the bytes, cp -r. By default hf_stream waits until all is on the disk, as cp -r and sync do; the others do
not, and are to be compared with durable=False. d9d takes part if its model_state can be imported:
`pip install --no-deps d9d`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checkpoints
import harness
from harness import Case, Contender, Prepare, Work
from save import with_cp, with_cp_and_sync

QKV = ("q_proj", "k_proj", "v_proj")


def with_hf_stream(durable: bool) -> Prepare:
    """Convert with hf_stream."""

    def prepare(source: Path, target: Path) -> Work:
        import hf_stream
        from hf_stream.layouts import packed_qkv

        layout = packed_qkv(json.loads((source / "config.json").read_text()))

        def work() -> Path:
            size = checkpoints.MAX_SHARD_NBYTES
            hf_stream.convert(source, target, layout=layout, max_shard_size=size, durable=durable)
            return target

        return work

    return prepare


def with_d9d(source: Path, target: Path) -> Work:
    """Convert with the reader and the writer of d9d, which stream group by group."""
    from d9d.model_state.io import read_model_state, write_model_state_local
    from d9d.model_state.mapper.compose import ModelStateMapperParallel
    from d9d.model_state.mapper.leaf import ModelStateMapperConcatenateTensors, ModelStateMapperIdentity

    def work() -> Path:
        packed = packed_names(source)
        pack = ModelStateMapperParallel(
            [
                ModelStateMapperConcatenateTensors(parts, name, dim=0) if parts else ModelStateMapperIdentity(name)
                for name, parts in packed.items()
            ]
        )
        write_model_state_local(
            target,
            mapper=ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in packed]),
            state_generator=read_model_state(source, pack, device="cpu", show_progress=False),
            shard_size_gb=checkpoints.MAX_SHARD_NBYTES / (1 << 30),
            show_progress=False,
        )
        shutil.copy(source / "config.json", target)
        return target

    return work


def with_torch(source: Path, target: Path) -> Work:
    """Load the whole checkpoint, concatenate, and write one file."""
    import torch
    from safetensors.torch import load_file, save_file

    def work() -> Path:
        tensors = {}
        for file in sorted(source.glob("*.safetensors")):
            tensors.update(load_file(file))
        result = {
            name: torch.cat([tensors.pop(part) for part in parts]) if parts else tensors.pop(name)
            for name, parts in packed_names(source).items()
        }
        target.mkdir()
        save_file(result, target / "model.safetensors", {"format": "pt"})
        shutil.copy(source / "config.json", target)
        return target

    return work


def packed_names(source: Path) -> dict[str, list[str]]:
    """Return the names after packing, each with the tensors it is made of; none for a tensor that stays as it is."""
    index = json.loads((source / "model.safetensors.index.json").read_text())
    packed: dict[str, list[str]] = {}
    for name in index["weight_map"]:
        module, _, rest = name.partition(".self_attn.")
        if rest.split(".")[0] in QKV:
            packed[f"{module}.self_attn.qkv_proj.weight"] = [f"{module}.self_attn.{part}.weight" for part in QKV]
        else:
            packed[name] = []
    return packed


CASES = {
    "packed-qkv": Case(
        "Convert Llama, separate q, k, v to packed qkv",
        "llama",
        {
            "hf_stream": Contender(with_hf_stream(durable=True)),
            "hf_stream, durable=False": Contender(with_hf_stream(durable=False)),
            "d9d": Contender(with_d9d, requires="d9d"),
            "load-cat-save": Contender(with_torch),
            "cp": Contender(with_cp, same_result=False),
            "cp, sync": Contender(with_cp_and_sync, same_result=False),
        },
        ["d9d", "load-cat-save", "cp", "cp, sync"],
    ),
}

if __name__ == "__main__":
    harness.main(CASES)
