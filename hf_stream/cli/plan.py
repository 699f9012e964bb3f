"""`hf-stream plan`: what a conversion would read and write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import click
import torch

from hf_stream.checkpoint import Conversion, plan_conversion
from hf_stream.checkpoint.files import DEFAULT_MAX_SHARD_SIZE
from hf_stream.checkpoint.mapping import FileFormat
from hf_stream.cli.arguments import (
    json_option,
    key_option,
    layout_options,
    nested_options,
    output_options,
    source_argument,
)
from hf_stream.cli.layout import chosen_layout, refuse_unmatched
from hf_stream.cli.text import count, shortened, size, table

_RULE_WIDTH = 88


@click.command()
@source_argument
@key_option
@layout_options
@output_options
@nested_options
@json_option
def plan(
    source: str,
    key: str | None,
    specs: tuple[str, ...],
    inverse: bool,
    allow_unmatched: bool,
    dtype: torch.dtype | None,
    max_shard_size: int | None,
    file_format: FileFormat | None,
    nested: bool,
    skip_unreadable: bool,
    as_json: bool,
) -> None:
    """Show what `convert` with the same options would read and write, and how many tensors each rule takes.

    Reads headers only. With --json, the tensors that each file would hold are listed as well.
    """
    conversion = plan_conversion(
        source,
        key=key,
        layout=chosen_layout(specs, inverse, source),
        dtype=dtype,
        max_shard_size=max_shard_size or DEFAULT_MAX_SHARD_SIZE,
        format=file_format,
        nested=nested,
        skip_unreadable=skip_unreadable,
    )
    click.echo(_as_json(conversion) if as_json else _as_text(conversion))
    refuse_unmatched(conversion.matches, allow_unmatched)


def _as_text(conversion: Conversion) -> str:
    files, reads = conversion.files, conversion.nbytes_read()
    rows = [("read", _name(file), "", size(nbytes)) for file, nbytes in reads.items()]
    rows += [("write", s.name, f"{len(s.header.tensors):,}", size(s.header.nbytes)) for s in files.shards]
    rows += [("write", name, "", size(len(content))) for name, content in files.small.items()]
    rows += [("carry", name, "", size(nbytes)) for name, nbytes in _carried(conversion)]
    tensors = count(len(conversion.tensors), "tensor")
    total = (
        f"reads {size(sum(reads.values()))}, writes {tensors} in {size(files.nbytes)}, "
        f"needs at most {size(conversion.peak_nbytes())} of memory"
    )
    tables = [table(("what", "file", "tensors", "bytes"), rows, right=("tensors", "bytes"))]
    if conversion.matches.rules:
        found = [(shortened(entry.rule, _RULE_WIDTH), f"{entry.tensors:,}") for entry in conversion.matches.rules]
        tables.insert(0, table(("rule", "tensors"), found, right=("tensors",)))
    return "\n".join([*tables, total])


def _as_json(conversion: Conversion) -> str:
    files, reads = conversion.files, conversion.nbytes_read()
    write: list[dict[str, object]] = [
        {
            "file": shard.name,
            "nbytes": shard.header.nbytes,
            "tensors": [
                {"name": name, "dtype": info.dtype, "shape": info.shape, "nbytes": info.nbytes}
                for name, info in shard.header.tensors.items()
            ],
        }
        for shard in files.shards
    ]
    write += [{"file": name, "nbytes": len(content), "tensors": []} for name, content in files.small.items()]
    return json.dumps(
        {
            "path": str(conversion.source.path),
            "nbytes_read": sum(reads.values()),
            "nbytes_written": files.nbytes,
            "peak_nbytes": conversion.peak_nbytes(),
            "rules": [{"rule": entry.rule, "tensors": entry.tensors} for entry in conversion.matches.rules],
            "read": [{"file": file, "nbytes": nbytes} for file, nbytes in reads.items()],
            "write": write,
            "carry": [{"file": name, "nbytes": nbytes} for name, nbytes in _carried(conversion)],
        },
        indent=2,
    )


def _name(file: str) -> str:
    return os.path.basename(file) or file


def _carried(conversion: Conversion) -> Iterator[tuple[str, int]]:
    """Path within the checkpoint, and bytes, of each small file."""
    for path in conversion.carried:
        yield str(path.relative_to(conversion.directory)), path.stat().st_size
