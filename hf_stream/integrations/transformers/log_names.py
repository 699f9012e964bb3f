"""Log lines name the directory that the user gave, and not the one in which its files grow."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hf_stream.formats.shared import Shared

Names = tuple[tuple[str, str], ...]

_names: ContextVar[Names] = ContextVar("hf_stream_log_names", default=())


@contextmanager
def logged_as(path: str | os.PathLike[str], given: str | os.PathLike[str]) -> Iterator[None]:
    """Run a block in which log lines of this context, whoever writes them, call one directory by another's name.

    Args:
        path: Where files are written.
        given: What lines say in its place. It may itself be a directory with another name, in a block around this one.
    """
    with _renaming():
        token = _names.set(((os.fspath(path), os.fspath(given)), *_names.get()))
        try:
            yield
        finally:
            _names.reset(token)


@Shared
@contextmanager
def _renaming() -> Iterator[None]:
    """Loggers have handlers of their own: it is where lines are made that all of them pass through."""
    plain = logging.getLogRecordFactory()

    def renamed(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = plain(*args, **kwargs)
        if names := _names.get():
            record.msg = _renamed(record.msg, names)
            if isinstance(record.args, tuple):
                record.args = tuple(_renamed(value, names) for value in record.args)
        return record

    logging.setLogRecordFactory(renamed)
    try:
        yield
    finally:
        # Whoever has put something over it meanwhile keeps that, which calls the plain one through this.
        if logging.getLogRecordFactory() is renamed:
            logging.setLogRecordFactory(plain)


def _renamed(value: Any, names: Names) -> Any:
    if not isinstance(value, str | os.PathLike):
        return value
    text = os.fspath(value)
    for path, given in names:
        text = text.replace(path + os.sep, os.path.join(given, "")).replace(path, given)
    return text
