"""`hf-stream layouts`: the layouts that have a name."""

from __future__ import annotations

import click

from hf_stream.cli.loading import Command
from hf_stream.utils.text import Table


@click.command(cls=Command)
def layouts() -> None:
    """List the layouts that --layout knows by name."""
    from hf_stream.layouts import names

    click.echo(str(Table(("name", "what it makes"), list(names().items()))))
