"""Importing the library, which takes seconds, when a command runs and not before."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import click

INTERRUPTED = 130
"""What the shell gives for SIGINT."""


class Command(click.Command):
    """A command that needs the library."""

    def invoke(self, ctx: click.Context) -> Any:
        """Load the library, and run the command."""
        load()
        return super().invoke(ctx)


def load() -> None:
    """Import torch and all that commands use, if that has not been done.

    Ctrl-C ends the program at once meanwhile: extension modules that are being initialised make other errors of the
    exception, or abort.
    """
    if "hf_stream.checkpoint" in sys.modules:
        return
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        import hf_stream.checkpoint
    else:
        signal.signal(signal.SIGINT, _leave)
        try:
            import hf_stream.checkpoint  # noqa: F401
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os.write(2, b"\ninterrupted\n")
    os._exit(INTERRUPTED)
