"""`hf-stream inspect`: the tensors of a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
import numpy as np
import torch

from hf_stream.checkpoint import Checkpoint, open_checkpoint, open_nested
from hf_stream.checkpoint.nested_conversion import open_nesting
from hf_stream.checkpoint.nested_structure import STRUCTURE
from hf_stream.cli.arguments import json_option, key_option, source_argument
from hf_stream.cli.text import count, printable, size, table
from hf_stream.formats.nested_paths import path_of
from hf_stream.formats.nested_scalars import shown

_ENTRIES = 12


@click.command()
@source_argument
@key_option
@json_option
def inspect(source: str, key: str | None, as_json: bool) -> None:
    """List the tensors of SRC: name, type, shape, bytes and file; of a nested state also what it is made of.

    Reads headers only.
    """
    nesting = open_nesting(Path(source), skip_unreadable=True) if key is None else None
    checkpoint = nesting.source if nesting else open_checkpoint(source, key=key, prefer_safetensors=False)
    click.echo(_as_json(checkpoint) if as_json else _as_text(checkpoint))
    if not as_json and (STRUCTURE in checkpoint.metadata or (nesting and nesting.metadata)):
        state = open_nested(checkpoint.path, prefer_safetensors=False, skip_unreadable=True)
        click.echo("\n".join(_outline(state)))


def _as_text(checkpoint: Checkpoint) -> str:
    facts = {name: checkpoint.facts(name) for name in checkpoint}
    rows = [
        (name, fact.dtype, str(list(fact.shape)), size(fact.nbytes), checkpoint.file_of(name))
        for name, fact in facts.items()
    ]
    elements = sum(math.prod(fact.shape) for fact in facts.values())
    total = (
        f"{count(len(rows), 'tensor')} in {count(len(checkpoint.files), 'file')}: "
        f"{count(elements, 'element')}, {size(checkpoint.nbytes)}"
    )
    return table(("name", "dtype", "shape", "bytes", "file"), rows, right=("bytes",)) + "\n" + total


def _as_json(checkpoint: Checkpoint) -> str:
    tensors = [(name, checkpoint.facts(name), checkpoint.file_of(name)) for name in checkpoint]
    return json.dumps(
        {
            "path": str(checkpoint.path),
            "nbytes": checkpoint.nbytes,
            "metadata": checkpoint.metadata,
            "files": [
                {"file": name, "nbytes": file.storage.nbytes, "tensors": len(file.names)}
                for name, file in checkpoint.files.items()
            ],
            "tensors": [
                {"name": name, "dtype": fact.dtype, "shape": fact.shape, "nbytes": fact.nbytes, "file": file}
                for name, fact, file in tensors
            ],
        },
        indent=2,
    )


def _outline(state: object) -> list[str]:
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
