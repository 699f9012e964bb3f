"""`hf-stream convert`: a checkpoint in another layout, type or sharding."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from hf_stream.cli.arguments import json_option, source_argument
from hf_stream.cli.conversion import Wanted, conversion_options
from hf_stream.cli.loading import Command
from hf_stream.cli.plan import show_plan
from hf_stream.cli.program import say
from hf_stream.utils.text import count, size

if TYPE_CHECKING:
    from hf_stream.checkpoint import Conversion
    from hf_stream.checkpoint.conversion import Outcome


@click.command(cls=Command)
@source_argument
@click.argument("destination", metavar="DST", type=click.Path())
@conversion_options
@click.option("--dry-run", is_flag=True, help="Show what would be read and written, as `plan` does, and write nothing.")
@json_option
def convert(dry_run: bool, as_json: bool, **options: Any) -> None:
    """Convert SRC without loading it, and print DST.

    DST is a directory, or a path that ends in .safetensors for a single file. It appears when everything is written,
    and weights that are there already are replaced. What lies beside the weights in SRC (config, tokenizer, ...) goes
    along into a directory, unless SRC is a single file. SRC may be a file of torch.save, or a pattern in quotes that
    finds several.

    A file of torch.save, or a safetensors file of OLMo, goes into a single file as a whole, in its nesting if it has
    one. With --key, --layout, --include, --exclude or --dtype, or into a directory without --nested, its named tensors
    go alone.
    """
    wanted = Wanted(**options)
    if dry_run:
        show_plan(wanted, as_json)
        return
    if as_json:
        raise click.UsageError("--json is for --dry-run.", click.get_current_context())
    started = time.time()
    conversion = wanted.planned()
    outcome = wanted.run(conversion)
    if not wanted.quiet:
        say(_summary(wanted, conversion, outcome, time.time() - started))
    # As bytes: a path need not be text.
    click.echo(os.fsencode(wanted.destination or ""))


def _summary(wanted: Wanted, conversion: Conversion, outcome: Outcome, seconds: float) -> str:
    """What this run has done, what it found done already, and what is gone."""
    nbytes_read = sum(conversion.of_files(outcome.written).nbytes_read().values())
    nbytes_written = sum(shard.header.nbytes for shard in outcome.written)
    lines = [
        f"read {size(nbytes_read)}, wrote {size(nbytes_written)} in {count(len(outcome.written), 'file')}"
        + (" as a nested state" if conversion.nested else "")
        + (", verified," if wanted.verify else "")
        + f" in {seconds:.1f} s: {nbytes_written / 1e6 / seconds:.0f} MB/s"
    ]
    if outcome.reused:
        nbytes = sum(shard.header.nbytes for shard in outcome.reused)
        lines.append(f"took over {count(len(outcome.reused), 'file')}, {size(nbytes)}, of an interrupted run")
    if outcome.replaced:
        nbytes = sum(outcome.replaced.values())
        files = "" if conversion.file else f"{count(len(outcome.replaced), 'file')} in "
        lines.append(f"replaced {files}'{wanted.destination}', {size(nbytes)}")
    return "\n".join(lines)
