"""`hf-stream clean`: what interrupted runs have left."""

from __future__ import annotations

import os

import click

from hf_stream.cli.arguments import quiet_option
from hf_stream.cli.loading import Command
from hf_stream.cli.program import say


@click.command(cls=Command)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--force", is_flag=True, help="Give up a checkpoint that cannot be completed.")
@quiet_option
def clean(directory: str, force: bool, quiet: bool) -> None:
    """Remove leftovers of interrupted runs for DIR, and list what was removed.

    DIR is the directory of a checkpoint, or where one was to be. A checkpoint that was being replaced is completed
    first, if that is possible. Anything else under the names of hf_stream's work directories is removed as well; links
    are not followed.
    """
    from hf_stream.checkpoint import clean as clean_checkpoint

    removed = clean_checkpoint(directory, force=force)
    for path in removed:
        click.echo(os.fsencode(path))
    if not removed and not quiet:
        say("nothing to remove")
