"""`hf-stream layouts`: the layouts that have a name."""

from __future__ import annotations

import click

from hf_stream.cli.text import table
from hf_stream.layouts import names


@click.command()
def layouts() -> None:
    """List the layouts that --layout knows by name."""
    click.echo(table(("name", "what it makes"), list(names().items())))
