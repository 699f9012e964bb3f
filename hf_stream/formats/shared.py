"""Changes to the whole process that overlapping blocks share: made with the first, undone with the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class Shared:
    """A decorator for context managers that change something global.

    Each thread that restored what it found when it came would, in any other order than last in, first out, put back the
    change of another one, and nobody would undo that.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[None]]) -> None:
        self._change = change
        # A block may end in a finalizer, which may come in the middle of another one's entry or exit.
        self._lock = threading.RLock()
        self._users = 0
        self._made = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a block in which the change is in force."""
        with self._lock:
            if self._users == 0:
                self._made.enter_context(self._change())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._made.close()
