"""Telling how many bytes have moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

# A bar that comes and goes at once only makes noise.
_SECONDS_BEFORE_BAR = 1.0


class Progress(Protocol):
    """Anything that counts, such as a tqdm bar."""

    def update(self, n: int, /) -> object:
        """Take note that `n` more bytes have moved."""


@contextmanager
def progress_bar(progress: bool | Progress | None, total: int, desc: str) -> Iterator[Progress | None]:
    """What to tell about progress, as `execute` documents it; a bar made here is closed at the end."""
    if progress is False:
        yield None
    elif progress is None or progress is True:
        from tqdm import tqdm

        only_terminal = None if progress is None else False
        delay = _SECONDS_BEFORE_BAR if progress is None else 0.0
        with tqdm(total=total, desc=desc, unit="B", unit_scale=True, disable=only_terminal, delay=delay) as bar:
            yield bar
    else:
        yield progress
