"""The command line `hf-stream`: one file for each command, data on stdout, talk on stderr.

Commands import the rest of the library when they run: help and completion need not wait for torch.
"""

from __future__ import annotations

import click

import hf_stream
from hf_stream.cli.clean import clean
from hf_stream.cli.convert import convert
from hf_stream.cli.env import env
from hf_stream.cli.inspect import inspect
from hf_stream.cli.layouts import layouts
from hf_stream.cli.plan import plan
from hf_stream.cli.program import Program
from hf_stream.cli.verify import verify

__all__ = ["main"]


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 verify found a difference; 2 an error, usage included; 130 interrupted; 141 nobody "
    "reads stdout any more.",
)
@click.version_option(hf_stream.__version__, prog_name="hf-stream", message="%(prog)s %(version)s")
def main() -> None:
    """Look into checkpoints, convert them without loading them, and compare them.

    SRC is a .safetensors, .pt, .pth or .bin file, an index file, a directory with one of these, or a pattern of parts
    in quotes. Data goes to stdout, everything else to stderr.
    """


for _command in (inspect, plan, convert, verify, layouts, clean, env):
    main.add_command(_command)
