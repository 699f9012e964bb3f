"""`hf-stream convert`: a checkpoint in another layout, type or sharding."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import click
import torch

import hf_stream
from hf_stream.checkpoint import Conversion, open_checkpoint, plan_conversion
from hf_stream.checkpoint.files import DEFAULT_MAX_SHARD_SIZE
from hf_stream.checkpoint.staging import work_directory
from hf_stream.cli.arguments import layout_options, output_options, quiet_option, source_argument
from hf_stream.cli.layout import chosen_layout
from hf_stream.cli.program import say
from hf_stream.cli.text import count, size

_SUFFIX = ".safetensors"
_UNLIMITED = 2**63


@click.command()
@source_argument
@click.argument("destination", metavar="DST", type=click.Path())
@layout_options
@output_options
@click.option("--verify", is_flag=True, help="Read both sides again and compare every bit before DST appears.")
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Keep the files that an interrupted run of the same conversion finished.",
)
@quiet_option
def convert(
    source: str,
    destination: str,
    specs: tuple[str, ...],
    inverse: bool,
    dtype: torch.dtype | None,
    max_shard_size: int | None,
    verify: bool,
    resume: bool,
    quiet: bool,
) -> None:
    """Convert SRC without loading it, and print DST.

    DST is a directory, or a path that ends in .safetensors for a single file. It appears when everything is written,
    and weights that are there already are replaced. What lies beside the weights in SRC (config, tokenizer, ...) goes
    along into a directory.
    """
    started = time.perf_counter()
    single = destination.endswith(_SUFFIX)
    if single and max_shard_size:
        raise click.UsageError(
            f"--max-shard-size splits into several files, but DST '{destination}' is one; give a directory.",
            click.get_current_context(),
        )
    conversion = plan_conversion(
        open_checkpoint(source),
        layout=chosen_layout(specs, inverse, source),
        dtype=dtype,
        max_shard_size=_UNLIMITED if single else max_shard_size or DEFAULT_MAX_SHARD_SIZE,
    )
    target = Path(destination)
    before = _files_of_earlier_run(target.parent if single else target)
    try:
        hf_stream.convert(
            conversion.source,
            target,
            layout=lambda _: conversion.tensors,  # planned already, with the dtype
            dtype=dtype,
            max_shard_size=max_shard_size or DEFAULT_MAX_SHARD_SIZE,
            resume=resume,
            verify=verify,
            progress=False if quiet else None,
        )
    except KeyboardInterrupt:
        hint = "the same command goes on where it stopped" if resume else "nothing is left behind"
        raise KeyboardInterrupt(hint) from None
    if not quiet:
        written = [
            shard
            for shard in conversion.files.shards
            if _identity(target if single else target / shard.name) not in before
        ]
        say(_summary(conversion, [shard.name for shard in written], time.perf_counter() - started, verify))
    # As bytes: a path need not be text.
    click.echo(os.fsencode(destination))


def _files_of_earlier_run(directory: Path) -> set[tuple[int, int, int]]:
    """What an interrupted run left for this one to take up, if it is the same conversion."""
    finished = work_directory(Path(os.path.realpath(directory))) / "files"
    return {_identity(file) for file in finished.iterdir()} if finished.is_dir() else set()


def _identity(file: Path) -> tuple[int, int, int]:
    # A rename keeps all three, writing the file anew does not.
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _summary(conversion: Conversion, written: list[str], seconds: float, verified: bool) -> str:
    shards = {shard.name: shard.header for shard in conversion.files.shards}
    names = [name for file in written for name in shards[file].tensors]
    this_run = dataclasses.replace(conversion, tensors={name: conversion.tensors[name] for name in names})
    nbytes_read = sum(this_run.nbytes_read().values())
    nbytes_written = sum(shards[file].nbytes for file in written)
    kept = len(shards) - len(written)
    return (
        f"read {size(nbytes_read)}, wrote {size(nbytes_written)} in {count(len(written), 'file')}"
        + (f" ({kept} more kept from an interrupted run)" if kept else "")
        + (", verified," if verified else "")
        + f" in {seconds:.1f} s: {nbytes_written / 1e6 / seconds:.0f} MB/s"
    )
