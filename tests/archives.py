"""Files of one tensor each, loaded as SwiftTransformer's users load them: with torch.jit.load."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def jit_load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.load.* is deprecated")  # which class of warning depends on torch
        return torch.jit.load(path)


def partitions(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """The tensors by their files' names; the attribute in a file is its name without the partition."""
    return {file.name: getattr(jit_load(file), file.name.removesuffix(".pt").split(".tp_")[0]) for file in files}
