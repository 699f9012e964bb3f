"""How every command ends: exit codes, errors and warnings as single lines on stderr, and no tracebacks for mistakes."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from hf_stream.cli.text import printable_lines
from hf_stream.errors import HfStreamError

# As diff and grep have it: 1 is an answer, 2 is trouble. The last two are what the shell gives for SIGINT and SIGPIPE.
DIFFERENT = 1
FAILED = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


class Program(click.Group):
    """A group whose commands return their exit code (None for 0) and raise what they like."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn whatever it ends with into an exit code."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        with _warnings_shown():
            code = self._exit_code(ctx)
        _drop_what_cannot_be_written()
        ctx.exit(code)

    def _exit_code(self, ctx: click.Context) -> int:
        try:
            code: int | None = super().invoke(ctx)
            return code or 0
        except BrokenPipeError:
            return PIPE_CLOSED
        except KeyboardInterrupt as interrupt:
            # The terminal has just echoed ^C.
            say("\n" + ": ".join(["interrupted", *map(str, interrupt.args)]))
            return INTERRUPTED
        except click.UsageError as error:
            say(f"error: {error.format_message()}")
            if error.ctx is not None:
                say(f"see '{error.ctx.command_path} --help'")
            return FAILED
        except (HfStreamError, OSError) as error:
            say(f"error: {_message(error)}")
            return FAILED


def say(message: str) -> None:
    """Tell the user something that is not data."""
    click.echo(printable_lines(message), err=True)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, HfStreamError) and error.strerror:
        return f"'{error.filename}': {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


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
