"""`hf-stream inspect`: the tensors of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from hf_stream.cli.arguments import json_option, key_option, selection_options, source_argument
from hf_stream.cli.loading import Command
from hf_stream.cli.program import show

if TYPE_CHECKING:
    from hf_stream.checkpoint import Checkpoint


@click.command(cls=Command)
@source_argument
@key_option
@selection_options
@click.option("--full", is_flag=True, help="A line for each tensor, with all of its name.")
@json_option
def inspect(
    source: str, key: str | None, include: tuple[str, ...], exclude: tuple[str, ...], full: bool, as_json: bool
) -> None:
    """List the tensors of SRC: name, type, shape, bytes and file; of a nested state also what it is made of.

    Tensors that differ in the numbers of their names alone stand in one line. Reads headers only.
    """
    from hf_stream.checkpoint import open_nested, open_repository
    from hf_stream.checkpoint.nested_conversion import open_nesting
    from hf_stream.checkpoint.nested_structure import STRUCTURE
    from hf_stream.checkpoint.overview import overview
    from hf_stream.checkpoint.paths import given_path
    from hf_stream.checkpoint.selection import select_names
    from hf_stream.cli.outline import outline

    nesting = open_nesting(given_path(source), skip_unreadable=True) if key is None else None
    checkpoint = nesting.source if nesting else open_repository(given_path(source), key)
    names = select_names(checkpoint, include or None, exclude or None, where=source)
    if as_json:
        click.echo(_as_json(checkpoint, names))
        return
    show(overview(checkpoint, names, full=full), fit=not full)
    if STRUCTURE in checkpoint.metadata or (nesting and nesting.metadata):
        state = open_nested(checkpoint.path, prefer_safetensors=False, skip_unreadable=True)
        click.echo("\n".join(outline(state)))


def _as_json(checkpoint: Checkpoint, names: Collection[str]) -> str:
    tensors = [(name, checkpoint.facts(name), checkpoint.file_of(name)) for name in names]
    return json.dumps(
        {
            "path": str(checkpoint.path),
            "nbytes": sum(fact.nbytes for _, fact, _ in tensors),
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
