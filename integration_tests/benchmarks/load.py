"""Loading a checkpoint into a model: transformers, hf_stream, and raw preadv into the merged parameters.

Besides: quantizing on the way to int8 with torchao, and offloading everything to disk, by transformers and hf_stream.

    python integration_tests/benchmarks/load.py
    python integration_tests/benchmarks/load.py --cases experts --contenders transformers hf_stream --repeat 9

transformers aliases the mapped files where nothing has to be converted; its memory is then pages of the file, not
anonymous memory, and the first use of each parameter is not in the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import models
import raw
import torch
from harness import Case, Contender, Prepare, Work

Load = Callable[..., Any]


def with_transformers(dtype: torch.dtype) -> Prepare:
    """Load with plain transformers."""

    def prepare(source: Path, target: Path) -> Work:
        load = transformers_load(source)
        return lambda: load(source, dtype=dtype)

    return prepare


def with_hf_stream(dtype: torch.dtype) -> Prepare:
    """Load with hf_stream."""

    def prepare(source: Path, target: Path) -> Work:
        load = hf_stream_load(source)
        return lambda: load(source, dtype=dtype)

    return prepare


def transformers_load(source: Path) -> Load:
    """Return transformers' way to load a model of the checkpoint's class."""
    load: Load = models.class_of(source).from_pretrained
    return load


def hf_stream_load(source: Path) -> Load:
    """Return ours."""
    import hf_stream

    return functools.partial(hf_stream.from_pretrained, models.class_of(source))


def to_int8(load_of: Callable[[Path], Load]) -> Prepare:
    """Load projections and merged experts as int8, quantized by torchao."""

    def prepare(source: Path, target: Path) -> Work:
        from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        load, names = load_of(source), (r"re:.*mlp\.experts\..*_proj", r"re:.*self_attn\..*_proj")
        config = TorchAoConfig(FqnToConfig({name: Int8WeightOnlyConfig() for name in names}))
        return lambda: load(source, dtype=torch.bfloat16, quantization_config=config)

    return prepare


def to_disk(load_of: Callable[[Path], Load]) -> Prepare:
    """Offload everything to disk; the result is what lies in the offload folder."""

    def prepare(source: Path, target: Path) -> Work:
        load = load_of(source)

        def work() -> Path:
            load(source, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=target)
            return target

        return work

    return prepare


def with_preadv(dtype: torch.dtype, threads: int, huge_pages: bool = False) -> Prepare:
    """Read into the parameters by hand; no model is built."""

    def prepare(source: Path, target: Path) -> Work:
        return lambda: raw.load(source, dtype, threads, huge_pages)

    return prepare


def contenders(dtype: torch.dtype) -> dict[str, Contender]:
    """Return all that load into parameters of a dtype."""
    return {
        "transformers": Contender(with_transformers(dtype)),
        "hf_stream": Contender(with_hf_stream(dtype)),
        "preadv": Contender(with_preadv(dtype, threads=2)),
        "preadv-4-threads": Contender(with_preadv(dtype, threads=4)),
        "preadv-huge-pages": Contender(with_preadv(dtype, threads=2, huge_pages=True)),
    }


def both(way: Callable[[Callable[[Path], Load]], Prepare], requires: str) -> dict[str, Contender]:
    """Return transformers and hf_stream, at something that needs a package."""
    return {
        "transformers": Contender(way(transformers_load), requires),
        "hf_stream": Contender(way(hf_stream_load), requires),
    }


PEERS = ["transformers", "preadv"]
CASES = {
    "experts": Case("Load Qwen3-MoE, merging experts", "qwen3-moe", contenders(torch.bfloat16), PEERS),
    "plain": Case("Load Llama, nothing to convert", "llama", contenders(torch.bfloat16), PEERS),
    "cast": Case("Load Llama, bfloat16 to float32", "llama", contenders(torch.float32), PEERS),
    "cast-experts": Case("Load Qwen3-MoE, bfloat16 to float32", "qwen3-moe", contenders(torch.float32), PEERS),
    "int8": Case("Load Qwen3-MoE, int8 by torchao", "qwen3-moe", both(to_int8, "torchao"), PEERS),
    "offload": Case("Load Qwen3-MoE, all on disk", "qwen3-moe", both(to_disk, "accelerate"), PEERS),
}

if __name__ == "__main__":
    harness.main(CASES)
