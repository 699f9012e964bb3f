"""Loading a checkpoint into a model: transformers, hf_stream, and raw preadv into the merged parameters.

    python integration_tests/benchmarks/load.py
    python integration_tests/benchmarks/load.py --cases experts --contenders transformers hf_stream --repeat 9

transformers aliases the mapped files where nothing has to be converted; its memory is then pages of the file, not
anonymous memory, and the first use of each parameter is not in the time.
"""

from __future__ import annotations

from pathlib import Path

import harness
import models
import raw
import torch
from harness import Case, Contender, Prepare, Work


def with_transformers(dtype: torch.dtype) -> Prepare:
    """Load with plain transformers."""

    def prepare(source: Path, target: Path) -> Work:
        model_class = models.class_of(source)
        return lambda: model_class.from_pretrained(source, dtype=dtype)

    return prepare


def with_hf_stream(dtype: torch.dtype) -> Prepare:
    """Load with hf_stream."""

    def prepare(source: Path, target: Path) -> Work:
        import hf_stream

        model_class = models.class_of(source)
        return lambda: hf_stream.from_pretrained(model_class, source, dtype=dtype)

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


PEERS = ["transformers", "preadv"]
CASES = {
    "experts": Case("Load Qwen3-MoE, merging experts", "qwen3-moe", contenders(torch.bfloat16), PEERS),
    "plain": Case("Load Llama, nothing to convert", "llama", contenders(torch.bfloat16), PEERS),
    "cast": Case("Load Llama, bfloat16 to float32", "llama", contenders(torch.float32), PEERS),
    "cast-experts": Case("Load Qwen3-MoE, bfloat16 to float32", "qwen3-moe", contenders(torch.float32), PEERS),
}

if __name__ == "__main__":
    harness.main(CASES)
