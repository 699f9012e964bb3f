"""`hf-stream convert`: a checkpoint in another layout, type or sharding."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence

import click
import torch

from hf_stream.checkpoint import Conversion, plan_conversion, run_conversion
from hf_stream.checkpoint.files import DEFAULT_MAX_SHARD_SIZE, ShardFile
from hf_stream.checkpoint.mapping import TORCHSCRIPT, FileFormat
from hf_stream.cli.arguments import (
    key_option,
    layout_options,
    nested_options,
    output_options,
    quiet_option,
    source_argument,
)
from hf_stream.cli.layout import chosen_layout, refuse_unmatched
from hf_stream.cli.program import say
from hf_stream.cli.text import count, size


@click.command()
@source_argument
@click.argument("destination", metavar="DST", type=click.Path())
@key_option
@layout_options
@output_options
@nested_options
@click.option(
    "--verify",
    is_flag=True,
    help="Read both sides again, the new files from the disk, and compare every bit before DST appears.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Keep the files that an interrupted run of the same conversion finished.",
)
@click.option(
    "--durable/--no-durable",
    default=None,
    help="Wait until everything is on the disk, so that it outlives a loss of power.  [default: durable, unless "
    "HF_STREAM_DURABLE=0]",
)
@quiet_option
def convert(
    source: str,
    destination: str,
    key: str | None,
    specs: tuple[str, ...],
    inverse: bool,
    allow_unmatched: bool,
    dtype: torch.dtype | None,
    max_shard_size: int | None,
    file_format: FileFormat | None,
    nested: bool,
    skip_unreadable: bool,
    verify: bool,
    resume: bool,
    durable: bool | None,
    quiet: bool,
) -> None:
    """Convert SRC without loading it, and print DST.

    DST is a directory, or a path that ends in .safetensors for a single file. It appears when everything is written,
    and weights that are there already are replaced. What lies beside the weights in SRC (config, tokenizer, ...) goes
    along into a directory, unless SRC is a single file. SRC may be a file of torch.save, or a pattern in quotes that
    finds several.

    A file of torch.save, or a safetensors file of OLMo, goes into a single file as a whole, in its nesting if it has
    one. With --key, --layout or --dtype, or into a directory without --nested, its named tensors go alone.
    """
    started = time.time()
    conversion = plan_conversion(
        source,
        destination,
        key=key,
        layout=chosen_layout(specs, inverse, source),
        dtype=dtype,
        max_shard_size=max_shard_size or DEFAULT_MAX_SHARD_SIZE,
        format=file_format,
        nested=nested,
        skip_unreadable=skip_unreadable,
    )
    refuse_unmatched(conversion.matches, allow_unmatched)
    if conversion.file and max_shard_size:
        raise click.UsageError(
            f"--max-shard-size splits into several files, but DST '{destination}' is one; give a directory.",
            click.get_current_context(),
        )
    if conversion.format == TORCHSCRIPT and max_shard_size:
        raise click.UsageError(
            "--max-shard-size has no meaning for TorchScript files, which hold one tensor each.",
            click.get_current_context(),
        )
    try:
        written = run_conversion(
            conversion,
            destination,
            resume=resume,
            verify=verify,
            durable=durable,
            progress=False if quiet else None,
        )
    except KeyboardInterrupt:
        hint = "the same command goes on where it stopped" if resume else "nothing is left behind"
        raise KeyboardInterrupt(hint) from None
    if not quiet:
        say(_summary(conversion, written, time.time() - started, verify))
    # As bytes: a path need not be text.
    click.echo(os.fsencode(destination))


def _summary(conversion: Conversion, shards: Sequence[ShardFile], seconds: float, verified: bool) -> str:
    """What this run did: it wrote `shards`; the others are from the run that it took up."""
    tensors = {name: conversion.tensors[name] for shard in shards for name in shard.header.tensors}
    nbytes_read = sum(dataclasses.replace(conversion, tensors=tensors).nbytes_read().values())
    nbytes_written = sum(shard.header.nbytes for shard in shards)
    kept = len(conversion.files.shards) - len(shards)
    return (
        f"read {size(nbytes_read)}, wrote {size(nbytes_written)} in {count(len(shards), 'file')}"
        + (" as a nested state" if conversion.nested else "")
        + (f" ({kept} more kept from an interrupted run)" if kept else "")
        + (", verified," if verified else "")
        + f" in {seconds:.1f} s: {nbytes_written / 1e6 / seconds:.0f} MB/s"
    )
