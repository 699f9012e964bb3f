"""The checkpoints of metaseq and Meta among the test data, opened as lazies by the names of their parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import hf_stream
from hf_stream.lazy import LazyTensor

DATA = Path(__file__).parent / "data" / "swift_transformer"

Tensors = dict[str, torch.Tensor]


def lazy(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: LazyTensor.from_tensor(tensor) for name, tensor in tensors.items()}


def real(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: t.materialize() if isinstance(t, LazyTensor) else t for name, t in tensors.items()}


def opened(case: str, files: str) -> Tensors:
    """The tensors of one file, or those of several with the number of their part."""
    return dict(hf_stream.open_checkpoint(DATA / case / "input" / files))


def manifest(case: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / case / "manifest.json").read_bytes())
    return content


def hf_tensors(case: str) -> Tensors:
    return load_file(DATA / case / "hf" / "model.safetensors")


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
