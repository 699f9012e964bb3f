"""What the system says of files, where timing, other tests and what else lies about must have no say in it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# Creating this is what the hostile files in tests/data are after. It may be there from something else.
_PWNED = Path("/tmp/pwned_by_pickle")


def _state(path: Path) -> tuple[int, int] | None:
    try:
        return path.stat().st_ino, path.stat().st_ctime_ns
    except OSError:
        return None


_BEFORE = _state(_PWNED)


def pwned() -> bool:
    """Whether a hostile file has got its code run."""
    return _state(_PWNED) != _BEFORE


def open_descriptors() -> list[str]:
    """Those of this process, without what earlier tests have left to the garbage collector."""
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))


def give_times_of(status: os.stat_result, path: Path, later: int = 0) -> None:
    """Give a file that was just changed the times it had before, or `later` nanoseconds; its ctime is another one.

    File systems stamp with a clock that ticks every few milliseconds: without waiting a change may not show.
    """
    while True:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later))
        if path.stat().st_ctime_ns != status.st_ctime_ns:
            return
