"""What a nested state is made of, in a few lines."""

from __future__ import annotations

import numpy as np
import torch

from hf_stream.formats.nested_paths import path_of
from hf_stream.formats.nested_scalars import shown
from hf_stream.utils.text import printable

_ENTRIES = 12


def outline(state: object) -> list[str]:
    """The outermost containers of a nested state, a line for each."""
    lines = [f"nested state: {_summary(state)}"]
    for key, value in _entries(state)[:_ENTRIES]:
        lines.append(f"  {printable(path_of([key]))}: {_summary(value)}")
        lines += [f"    {printable(path_of([key]))}: {_summary(item)}" for key, item in _entries(value)[:_ENTRIES]]
        lines += _more("    ", value)
    return lines + _more("  ", state)


def _entries(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _more(indent: str, value: object) -> list[str]:
    left = len(_entries(value)) - _ENTRIES
    return [f"{indent}... and {left:,} more"] if left > 0 else []


def _summary(value: object) -> str:
    if isinstance(value, dict | list | tuple):
        return f"{type(value).__name__} of {len(value):,}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{'tensor' if isinstance(value, torch.Tensor) else 'numpy array'} of shape {list(value.shape)}"
    return printable(shown(value))
