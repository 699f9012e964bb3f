"""What `convert` does and `plan` shows: one command line for both, and the conversion that it asks for."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hf_stream.cli.arguments import (
    DtypeParam,
    SizeParam,
    key_option,
    layout_options,
    quiet_option,
    run_options,
    selection_options,
)
from hf_stream.utils.text import count, size

if TYPE_CHECKING:
    import torch

    from hf_stream.checkpoint import Conversion
    from hf_stream.checkpoint.conversion import Outcome
    from hf_stream.checkpoint.mapping import FileFormat
    from hf_stream.checkpoint.prospect import Prospect

Command = TypeVar("Command", bound=Callable[..., Any])

_FORMATS = ("safetensors", "torchscript")
_OPTIONS = (
    key_option,
    layout_options,
    selection_options,
    click.option(
        "--dtype",
        type=DtypeParam(),
        metavar="TYPE",
        help="What floating-point tensors become: bf16, fp16, fp32, or any such type by torch's or safetensors' name. "
        "What the model of config.json keeps in float32 stays so.",
    ),
    click.option(
        "--max-shard-size",
        type=SizeParam(),
        metavar="SIZE",
        help="Begin a new file beyond this, in bytes or like 200MB.  [default: 5GB]",
    ),
    click.option(
        "--format",
        "file_format",
        type=click.Choice(_FORMATS),
        help="torchscript writes a TorchScript archive for each tensor, as SwiftTransformer loads them.  [default: "
        "torchscript with --layout swift-transformer, else safetensors]",
    ),
    click.option(
        "--nested",
        is_flag=True,
        help="Write all that a file of torch.save or of OLMo holds, in its nesting, into a directory as well.",
    ),
    click.option(
        "--skip-unreadable",
        is_flag=True,
        help="Leave out, with a warning, what is neither a tensor nor a plain value in a file of torch.save or OLMo.",
    ),
    click.option(
        "--verify",
        is_flag=True,
        help="Read both sides again, the new files from the disk, and compare every bit before DST appears.",
    ),
    click.option(
        "--resume/--no-resume",
        default=True,
        show_default=True,
        help="Keep the files that an interrupted run of the same conversion finished.",
    ),
    click.option(
        "--durable/--no-durable",
        default=None,
        help="Wait until everything is on the disk, so that it outlives a loss of power.  [default: durable, unless "
        "HF_STREAM_DURABLE=0]",
    ),
    run_options,
    quiet_option,
)


def conversion_options(command: Command) -> Command:
    """Add all options of a conversion; the command passes them on to `Wanted`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A conversion as the command line asks for it."""

    source: str
    destination: str | None
    key: str | None
    specs: tuple[str, ...]
    inverse: bool
    scope: str | None
    config: str | None
    allow_unmatched: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    dtype: torch.dtype | None
    max_shard_size: int | None
    file_format: FileFormat | None
    nested: bool
    skip_unreadable: bool
    verify: bool
    resume: bool
    durable: bool | None
    buffer_size: int | None
    threads: int | None
    quiet: bool

    def planned(self) -> Conversion:
        """The conversion, after everything that can be checked without writing."""
        from hf_stream.checkpoint import plan_conversion
        from hf_stream.checkpoint.files import DEFAULT_MAX_SHARD_SIZE
        from hf_stream.checkpoint.mapping import TORCHSCRIPT
        from hf_stream.cli.layout import chosen_layout

        conversion = plan_conversion(
            self.source,
            self.destination,
            key=self.key,
            layout=chosen_layout(self.specs, self.inverse, self.source, self.config, self.scope),
            allow_patterns=self.include or None,
            ignore_patterns=self.exclude or None,
            dtype=self.dtype,
            max_shard_size=self.max_shard_size or DEFAULT_MAX_SHARD_SIZE,
            format=self.file_format,
            nested=self.nested,
            skip_unreadable=self.skip_unreadable,
        )
        if conversion.file and self.max_shard_size:
            raise click.UsageError(
                f"--max-shard-size splits into several files, but DST '{self.destination}' is one; give a directory.",
                click.get_current_context(),
            )
        if conversion.format == TORCHSCRIPT and self.max_shard_size:
            raise click.UsageError(
                "--max-shard-size has no meaning for TorchScript files, which hold one tensor each.",
                click.get_current_context(),
            )
        if self.destination is not None:
            conversion.check_destination(self.destination)
        return conversion

    def prospect(self, conversion: Conversion) -> Prospect:
        """What running it would do."""
        from hf_stream.checkpoint.prospect import Prospect

        if self.destination is None:
            return Prospect(conversion, buffer_size=self.buffer_nbytes)
        kept = conversion.kept(self.destination) if self.resume else None
        return Prospect(
            conversion, kept.shards if kept else (), conversion.replaced(self.destination), self.buffer_nbytes
        )

    def run(self, conversion: Conversion) -> Outcome:
        """Do it. A KeyboardInterrupt says what is left, and how to go on."""
        from hf_stream.checkpoint import run_conversion
        from hf_stream.cli.layout import refuse_unmatched

        refuse_unmatched(conversion.matches, self.allow_unmatched)
        destination = self.destination or ""
        try:
            return run_conversion(
                conversion,
                destination,
                resume=self.resume,
                verify=self.verify,
                durable=self.durable,
                buffer_size=self.buffer_nbytes,
                threads=self.threads,
                progress=False if self.quiet else None,
            )
        except KeyboardInterrupt:
            kept = conversion.kept(destination) if self.resume else None
            if kept is None:
                raise KeyboardInterrupt("nothing is left behind") from None
            raise KeyboardInterrupt(
                f"'{kept.path}' keeps {count(len(kept.shards), 'finished file')}, {size(kept.nbytes)}; the same "
                f"command goes on from there, and 'hf-stream clean {shlex.quote(destination)}' removes what is kept"
            ) from None

    @property
    def buffer_nbytes(self) -> int:
        """Memory for bytes on their way."""
        from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE

        return self.buffer_size or DEFAULT_BUFFER_SIZE
