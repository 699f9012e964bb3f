"""Options that several commands share, and what their words mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import torch

from hf_stream.checkpoint.files import DEFAULT_MAX_SHARD_SIZE
from hf_stream.checkpoint.mapping import SAFETENSORS, TORCHSCRIPT
from hf_stream.errors import FormatError
from hf_stream.formats.dtypes import CAST_TARGETS, TORCH_DTYPES
from hf_stream.formats.shards import parse_size

Command = TypeVar("Command", bound=Callable[..., Any])

_SHORT = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def _floating_types() -> dict[str, torch.dtype]:
    """Words for a floating-point type: safetensors' names, torch's names, and the usual short ones."""
    found = {name.lower(): dtype for name, dtype in TORCH_DTYPES.items() if dtype in CAST_TARGETS}
    return found | {str(dtype).removeprefix("torch."): dtype for dtype in found.values()} | _SHORT


class DtypeParam(click.ParamType[torch.dtype]):
    """A floating-point type by any of its names."""

    name = "dtype"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> torch.dtype:
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
        except FormatError as error:
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
    """Add `--layout` and `--inverse`, for `chosen_layout`, and `--allow-unmatched`, for `refuse_unmatched`."""
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
    return layout(inverse(allow_unmatched(command)))


def output_options(command: Command) -> Command:
    """Add `--dtype`, `--max-shard-size` and `--format`."""
    dtype = click.option(
        "--dtype",
        type=DtypeParam(),
        metavar="TYPE",
        help="What floating-point tensors become: bf16, fp16, fp32, or any such type by torch's or safetensors' name.",
    )
    max_shard_size = click.option(
        "--max-shard-size",
        type=SizeParam(),
        metavar="SIZE",
        help=f"Begin a new file beyond this, in bytes or like 200MB.  [default: {DEFAULT_MAX_SHARD_SIZE}]",
    )
    file_format = click.option(
        "--format",
        "file_format",
        type=click.Choice([SAFETENSORS, TORCHSCRIPT]),
        help=f"{TORCHSCRIPT} writes a TorchScript archive for each tensor, as SwiftTransformer loads them.  [default: "
        f"{TORCHSCRIPT} with --layout swift-transformer, else {SAFETENSORS}]",
    )
    return dtype(max_shard_size(file_format(command)))


def nested_options(command: Command) -> Command:
    """Add `--nested` and `--skip-unreadable`."""
    nested = click.option(
        "--nested",
        is_flag=True,
        help="Write all that a file of torch.save or of OLMo holds, in its nesting, into a directory as well.",
    )
    skip_unreadable = click.option(
        "--skip-unreadable",
        is_flag=True,
        help="Leave out, with a warning, what OLMo pickled and is no plain value, instead of refusing the file.",
    )
    return nested(skip_unreadable(command))
