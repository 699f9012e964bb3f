"""How every command ends: exit codes, errors and warnings as single lines on stderr, and no tracebacks unless asked."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from hf_stream.cli.loading import INTERRUPTED
from hf_stream.errors import HfStreamError
from hf_stream.utils.text import Table, printable, printable_lines

# As diff and grep have it: 1 is an answer, 2 is trouble. The last is what the shell gives for SIGPIPE.
DIFFERENT = 1
FAILED = 2
PIPE_CLOSED = 141


@dataclass
class Settings:
    """What holds for all of a program's run."""

    debug: bool = False


class Program(click.Group):
    """A group whose commands return their exit code (None for 0) and raise what they like."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_debug_option())

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, with --debug."""
        cmd.params.append(_debug_option())
        super().add_command(cmd, name)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the options before the command."""
        settings = extra.setdefault("obj", Settings())
        with _endings(settings):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn whatever it ends with into an exit code."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            with _warnings_shown(), _endings(ctx.obj):
                ctx.exit(super().invoke(ctx) or 0)
        finally:
            _drop_what_cannot_be_written()


def say(message: str) -> None:
    """Tell the user something that is not data."""
    click.echo(printable_lines(message), err=True)


def show(*tables: Table, fit: bool = True) -> None:
    """Print tables to stdout, no wider than the terminal if there is one."""
    width = shutil.get_terminal_size().columns if fit and sys.stdout.isatty() else None
    for table in tables:
        click.echo(table.text(width))


@contextmanager
def _endings(settings: Settings) -> Iterator[None]:
    """Tell what went wrong, and leave with its exit code."""
    try:
        yield
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - what nobody expects has an exit code as well
        if settings.debug:
            say("".join(traceback.format_exception(error)).rstrip())
        code, lines = _ending(error, settings.debug)
        for line in lines:
            say(line)
        raise click.exceptions.Exit(code) from None


def _ending(error: BaseException, debug: bool) -> tuple[int, Sequence[str]]:
    """The exit code of an error, and what to say of it."""
    interrupt = _interrupt(error)
    if interrupt is not None:
        # The terminal has just echoed ^C.
        return INTERRUPTED, ["\n" + ": ".join(["interrupted", *map(str, interrupt.args)])]
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED, []
    if isinstance(error, click.UsageError):
        help_of = [f"see '{error.ctx.command_path} --help'"] if error.ctx is not None else []
        return FAILED, [f"error: {error.format_message()}", *help_of]
    if isinstance(error, HfStreamError | OSError):
        return FAILED, [f"error: {_message(error)}"]
    text = printable(f"{type(error).__name__}: {error}".rstrip(": "))
    hint = "report it with the traceback" if debug else "--debug shows the traceback; report it with that"
    return FAILED, [f"error: {text} (unexpected: {hint} and what `hf-stream env` prints)"]


def _interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """The ctrl-C under an error; an extension module that is being imported makes an ImportError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or (error.__context__ if isinstance(error, ImportError) else None)
    return error


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, HfStreamError) and error.strerror:
        return f"'{error.filename}': {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def _debug_option() -> click.Option:
    def switch_on(ctx: click.Context, _: click.Parameter, debug: bool) -> None:
        ctx.obj.debug |= debug

    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=switch_on,
        help="Show the traceback of an error.",
    )


class _Talk(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def _warnings_shown() -> Iterator[None]:
    logger, handler = logging.getLogger("hf_stream"), _Talk(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _drop_what_cannot_be_written() -> None:
    """Empty stdout's buffer, or else the interpreter would try once more at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
