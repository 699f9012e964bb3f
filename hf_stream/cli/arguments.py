"""Options that several commands share, and what their words mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hf_stream.cli.loading import load
from hf_stream.errors import ArgumentError
from hf_stream.utils.sizes import parse_size

if TYPE_CHECKING:
    import torch

Command = TypeVar("Command", bound=Callable[..., Any])


def _floating_types() -> dict[str, torch.dtype]:
    """Words for a type that weights can be cast to."""
    from hf_stream.formats.dtypes import BY_NAME, CAST_TARGETS

    return {name: dtype for name, dtype in BY_NAME.items() if dtype in CAST_TARGETS}


class DtypeParam(click.ParamType["torch.dtype"]):
    """A floating-point type by any of its names."""

    name = "dtype"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> torch.dtype:
        load()
        types = _floating_types()
        if value.lower() not in types:
            self.fail(f"'{value}' is not a floating-point type; known are {', '.join(types)}", param, ctx)
        return types[value.lower()]


class SizeParam(click.ParamType[int]):
    """A number of bytes, plain or with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            nbytes = int(value) if value.isdecimal() else parse_size(value)
        except ArgumentError as error:
            self.fail(str(error), param, ctx)
        if nbytes <= 0:
            self.fail(f"size '{value}' leaves no room for a tensor", param, ctx)
        return nbytes


source_argument = click.argument("source", metavar="SRC", type=click.Path())

key_option = click.option(
    "--key",
    metavar="KEY",
    help="Where the tensors are in a file of torch.save that holds more than one dict of them, such as 'model'.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, with exact numbers, for programs.")

quiet_option = click.option("--quiet", "-q", is_flag=True, help="No progress and no summary; warnings and errors only.")


def layout_options(command: Command) -> Command:
    """Add what `chosen_layout` takes, and `--allow-unmatched`, for `refuse_unmatched`."""
    layout = click.option(
        "--layout",
        "-l",
        "specs",
        multiple=True,
        metavar="NAME|FILE.py:NAME",
        help="How names and shapes change: a name that `hf-stream layouts` lists, sizes then being read from the "
        "config.json beside the checkpoint; or something in a Python file of yours, which is run. Several apply from "
        "left to right.",
    )
    inverse = click.option("--inverse", is_flag=True, help="Go the other way: the whole of --layout undone.")
    allow_unmatched = click.option(
        "--allow-unmatched", is_flag=True, help="Go on, with a warning, when a rule of --layout finds no tensor."
    )
    config = click.option(
        "--config",
        metavar="PATH",
        help="The model's config, for the sizes that --layout needs: a file, or its directory.  [default: the "
        "config.json beside SRC]",
    )
    scope = click.option(
        "--scope",
        metavar="PREFIX[=NEW]",
        help="Apply --layout to a part of the model, the names that begin with PREFIX, which becomes NEW.",
    )
    return layout(inverse(scope(config(allow_unmatched(command)))))


def selection_options(command: Command) -> Command:
    """Add `--include` and `--exclude`, as `hf download` has them for files."""
    include = click.option(
        "--include",
        multiple=True,
        metavar="PATTERN",
        help="Take only the tensors whose names match, such as '*.layers.0.*', in quotes. May be given several times.",
    )
    exclude = click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="Leave out the tensors whose names match. May be given several times.",
    )
    return include(exclude(command))


def run_options(command: Command) -> Command:
    """Add `--buffer-size` and `--threads`."""
    buffer_size = click.option(
        "--buffer-size",
        type=SizeParam(),
        metavar="SIZE",
        help="Memory for bytes on their way, in bytes or like 200MB.  [default: 64 MiB]",
    )
    threads = click.option(
        "--threads",
        type=click.IntRange(min=1),
        metavar="N",
        help="Threads that move bytes.  [default: one for each core, at most 4]",
    )
    return buffer_size(threads(command))
