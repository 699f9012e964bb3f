"""Telling how many bytes have moved."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from hf_stream.errors import ArgumentTypeError

# A bar that comes and goes at once only makes noise.
_SECONDS_BEFORE_BAR = 1.0


class Progress(Protocol):
    """Anything that counts, such as a tqdm bar."""

    def update(self, n: int, /) -> object:
        """Take note that `n` more bytes have moved."""


@contextmanager
def progress_bar(progress: bool | Progress | None, total: int, desc: str) -> Iterator[Progress | None]:
    """What to tell about progress, as `execute` documents it; a bar made here is closed at the end."""
    # A bar takes a lock that forked processes share, though it is not to be shown: one of them that was killed at the
    # wrong moment would stop the others. So none is made then.
    if progress is False or (progress is None and not _is_terminal()):
        yield None
    elif progress is None or progress is True:
        from tqdm import tqdm

        delay = _SECONDS_BEFORE_BAR if progress is None else 0.0
        with tqdm(total=total, desc=desc, unit="B", unit_scale=True, delay=delay) as bar:
            yield bar
    elif callable(getattr(progress, "update", None)):
        yield progress
    else:
        raise ArgumentTypeError(f"progress= is {progress!r:.100}; pass True, False, None, or what has update(n)")


def _is_terminal() -> bool:
    """Whether stderr, where bars go, is one; it may be closed, or missing in a program without a console."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
