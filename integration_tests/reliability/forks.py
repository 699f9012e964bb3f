"""Runs an action in a forked process, and says how that ended."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Ended:
    """How a process ended: with a value, with an error, by a signal, or not within the time."""

    value: Any = None
    error: str | None = None
    signal: int | None = None
    late: bool = False

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL and not self.late

    def __str__(self) -> str:
        if self.late:
            return "did not end in time"
        if self.signal is not None:
            return f"died of signal {self.signal}"
        return self.error or f"ended with {self.value!r}"


def forked(action: Callable[[], Any], seconds: float = 60, quiet: bool = False) -> Ended:
    """Run an action in a child of this process; what it returns must be picklable."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        _act(action, reader, writer, quiet)
    os.close(writer)
    try:
        return _wait(pid, reader, seconds)
    finally:
        os.close(reader)


def _act(action: Callable[[], Any], reader: int, writer: int, quiet: bool) -> None:
    code = 70
    try:
        os.close(reader)
        if quiet:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            said = pickle.dumps((action(), None))
        except BaseException as error:  # noqa: BLE001, it is told to the parent
            where = traceback.extract_tb(error.__traceback__)[-1:]
            place = "".join(f" [{frame.filename.rpartition('/')[2]}:{frame.lineno}]" for frame in where)
            said = pickle.dumps((None, f"{type(error).__name__}: {error}{place}"))
        with os.fdopen(writer, "wb") as stream:
            stream.write(said)
        code = 0
    finally:
        os._exit(code)


def _wait(pid: int, reader: int, seconds: float) -> Ended:
    deadline = time.monotonic() + seconds
    said = b""
    late = False
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            late = True
            os.kill(pid, signal.SIGKILL)
            break
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        said += chunk
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) or not said:
        return Ended(signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, late=late)
    value, error = pickle.loads(said)
    return Ended(value, error)
