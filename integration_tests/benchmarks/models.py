"""The transformers classes of the benchmark checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def class_of(source: Path) -> Any:
    """Return the model class that a checkpoint names, with its module imported."""
    import transformers

    [name] = json.loads((source / "config.json").read_text())["architectures"]
    return getattr(transformers, name)


def load_into_memory(source: Path) -> Any:
    """Load with plain transformers and move every parameter to anonymous memory, as after training."""
    model = class_of(source).from_pretrained(source, dtype=torch.bfloat16)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
    return model
