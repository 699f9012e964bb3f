"""`hf-stream plan`: what a conversion would read and write."""

from __future__ import annotations

import json
from typing import Any

import click

from hf_stream.cli.arguments import json_option, source_argument
from hf_stream.cli.conversion import Wanted, conversion_options
from hf_stream.cli.loading import Command
from hf_stream.cli.program import show


@click.command(cls=Command)
@source_argument
@click.argument("destination", metavar="[DST]", required=False, type=click.Path())
@conversion_options
@json_option
def plan(as_json: bool, **options: Any) -> None:
    """Show what `convert` with the same arguments would read and write, and how many tensors each rule takes.

    It is `convert --dry-run`: reads headers only, and writes nothing. Given DST, it says as well what is replaced
    there, and what an interrupted run has left that is kept. With --json, the tensors that each file would hold are
    listed.
    """
    show_plan(Wanted(**options), as_json)


def show_plan(wanted: Wanted, as_json: bool) -> None:
    """Print what would be done, and then what is wrong with it."""
    from hf_stream.cli.layout import refuse_unmatched

    conversion = wanted.planned()
    prospect = wanted.prospect(conversion)
    if as_json:
        click.echo(json.dumps(prospect.data, indent=2))
    else:
        show(*prospect.tables)
    refuse_unmatched(conversion.matches, wanted.allow_unmatched)
