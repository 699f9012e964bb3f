"""`hf-stream verify`: whether two checkpoints are the same, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hf_stream.cli.arguments import key_option, layout_options, quiet_option
from hf_stream.cli.loading import Command
from hf_stream.cli.program import DIFFERENT, say
from hf_stream.utils.text import count, printable, size

if TYPE_CHECKING:
    from hf_stream.checkpoint import Differences


@click.command(cls=Command, epilog="Exit codes: 0 equal; 1 different; 2 an error, usage included.")
@click.argument("first", metavar="A", type=click.Path())
@click.argument("second", metavar="B", type=click.Path())
@key_option
@layout_options
@quiet_option
def verify(
    first: str,
    second: str,
    key: str | None,
    specs: tuple[str, ...],
    inverse: bool,
    scope: str | None,
    config: str | None,
    allow_unmatched: bool,
    quiet: bool,
) -> int:
    """Compare checkpoints A and B: names, shapes, types and every bit.

    A line on stdout tells each difference. --key is that of A. --layout changes A before it is compared, so that A and
    what `convert` made of it are equal. In how many files the tensors are makes no difference.
    """
    from hf_stream.checkpoint import open_repository
    from hf_stream.checkpoint import verify as verify_checkpoints
    from hf_stream.checkpoint.components import apart
    from hf_stream.checkpoint.mapping import map_tensors
    from hf_stream.checkpoint.paths import given_path
    from hf_stream.cli.layout import chosen_layout, refuse_unmatched

    a, b = open_repository(given_path(first), key), open_repository(given_path(second))
    layout = chosen_layout(specs, inverse, first, config, scope)
    own, others = apart(a)
    mapped, matches = map_tensors(layout, own, a.config)
    refuse_unmatched(matches, allow_unmatched)
    matches.report()
    differences = verify_checkpoints({**mapped, **others}, b, progress=False if quiet else None)
    if differences:
        click.echo(str(_printable(differences)))
    if not quiet:
        say(
            f"different: {count(_number(differences), 'tensor')}"
            if differences
            else f"equal: {count(len(b), 'tensor')}, {size(b.nbytes)}"
        )
    return DIFFERENT if differences else 0


def _number(found: Differences) -> int:
    return len({*found.missing, *found.extra, *found.shapes, *found.dtypes, *found.values})


def _printable(found: Differences) -> Differences:
    from hf_stream.checkpoint import Differences

    return Differences(
        missing=list(map(printable, found.missing)),
        extra=list(map(printable, found.extra)),
        shapes={printable(name): shapes for name, shapes in found.shapes.items()},
        dtypes={printable(name): dtypes for name, dtypes in found.dtypes.items()},
        values={printable(name): value for name, value in found.values.items()},
    )
