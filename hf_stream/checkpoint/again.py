"""Opening once more what was replaced while it was being opened."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from hf_stream.errors import HfStreamError
from hf_stream.storage.opened import FileIdentity

logger = logging.getLogger(__name__)

# Seconds between attempts. To put new files in the place of old ones takes milliseconds.
PAUSES: Final = (0.01, 0.03, 0.1, 0.3, 1.0)

_CHECKPOINT: Final = re.compile(r".*\.(bin|ckpt|json|pt|pth|safetensors)", re.DOTALL)

Result = TypeVar("Result")
State = dict[str, FileIdentity | None]


def state_of(paths: Iterable[str | os.PathLike[str]]) -> State:
    """What is at these paths now; None where nothing is."""
    return {os.fspath(path): _identity(path) for path in paths}


def state_of_directory(directory: str | os.PathLike[str], names: re.Pattern[str] = _CHECKPOINT) -> State:
    """The files of such names in a directory as they are now; nothing for what is no directory."""
    try:
        found = os.listdir(directory)
    except OSError:
        return {}
    return state_of(os.path.join(directory, name) for name in found if names.fullmatch(name))


def until_unchanged(
    attempt: Callable[[], Result],
    state: Callable[[], State],
    what: str | os.PathLike[str],
    errors: tuple[type[Exception], ...] = (HfStreamError, OSError),
) -> Result:
    """The result of an attempt, which is repeated a few times if it fails while files are being replaced.

    Args:
        attempt: Opens the files; fails if it has met some from before and some from after a change.
        state: Tells the files' state; an attempt that failed is repeated only if that has changed.
        what: What the log calls the files.
        errors: What to repeat after.
    """
    for pause in PAUSES:
        before = state()
        try:
            return attempt()
        except errors as error:
            time.sleep(pause)
            if state() == before:
                raise
            logger.info("'%s' was replaced while it was being opened, and is opened again: %s", os.fspath(what), error)
    return attempt()


def _identity(path: str | os.PathLike[str]) -> FileIdentity | None:
    try:
        return FileIdentity.of(os.stat(path))
    except OSError:
        return None
