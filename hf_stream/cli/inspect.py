"""`hf-stream inspect`: the tensors of a checkpoint."""

from __future__ import annotations

import json
import math

import click

from hf_stream.checkpoint import Checkpoint, open_checkpoint
from hf_stream.cli.arguments import json_option, source_argument
from hf_stream.cli.text import count, size, table


@click.command()
@source_argument
@json_option
def inspect(source: str, as_json: bool) -> None:
    """List the tensors of SRC: name, type, shape, bytes and file.

    Reads headers only.
    """
    checkpoint = open_checkpoint(source)
    click.echo(_as_json(checkpoint) if as_json else _as_text(checkpoint))


def _as_text(checkpoint: Checkpoint) -> str:
    rows = [
        (name, info.dtype, str(list(info.shape)), size(info.nbytes), file)
        for file, header in checkpoint.headers.items()
        for name, info in header.tensors.items()
    ]
    elements = sum(math.prod(info.shape) for header in checkpoint.headers.values() for info in header.tensors.values())
    total = (
        f"{count(len(rows), 'tensor')} in {count(len(checkpoint.headers), 'file')}: "
        f"{count(elements, 'element')}, {size(checkpoint.nbytes)}"
    )
    return table(("name", "dtype", "shape", "bytes", "file"), rows, right=("bytes",)) + "\n" + total


def _as_json(checkpoint: Checkpoint) -> str:
    headers = checkpoint.headers.items()
    return json.dumps(
        {
            "path": str(checkpoint.path),
            "nbytes": checkpoint.nbytes,
            "metadata": checkpoint.metadata,
            "files": [
                {"file": file, "nbytes": header.nbytes, "tensors": len(header.tensors)} for file, header in headers
            ],
            "tensors": [
                {"name": name, "dtype": info.dtype, "shape": info.shape, "nbytes": info.nbytes, "file": file}
                for file, header in headers
                for name, info in header.tensors.items()
            ],
        },
        indent=2,
    )
