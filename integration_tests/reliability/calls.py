"""Every call by which Python code changes or reads a file system: counted, and open to interference."""

from __future__ import annotations

import _io
import builtins
import errno
import fcntl
import io
import os
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

DATA = frozenset({"write", "writev", "pwrite", "pwritev", "sendfile", "copy_file_range", "splice"})
SPACE = frozenset({"posix_fallocate", "truncate", "ftruncate"})
NAMES = frozenset({"rename", "replace", "unlink", "remove", "rmdir", "mkdir", "mknod", "mkfifo", "link", "symlink"})
STATUS = frozenset({"chmod", "fchmod", "chown", "fchown", "utime", "setxattr"})
SYNCS = frozenset({"fsync", "fdatasync", "sync"})
# `create` is an open that may change something, `open` one that only reads.
CHANGES = DATA | SPACE | NAMES | STATUS | SYNCS | {"create"}
# Not `stat`: Python's own `os.path.exists` takes its failure for an answer.
READS = frozenset({"open", "read", "pread", "readv", "preadv", "listdir", "scandir"})
LOCKS = frozenset({"flock", "lockf"})

_MAY_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass
class Call:
    """One call that is about to be made: `function(*args, **kwargs)`, on something at `path`."""

    number: int
    name: str
    path: str
    function: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)

    @property
    def label(self) -> str:
        return f"{self.number} ({self.name} {os.path.basename(self.path)})"

    def half(self) -> None:
        """Do half of it, where it moves bytes; nothing otherwise."""
        args = list(self.args)
        if self.name in ("write", "pwrite"):
            at = len(args) - (1 if self.name == "write" else 2)
            data = memoryview(args[at]).cast("B")
            args[at] = data[: len(data) // 2]
        elif self.name in ("writev", "pwritev"):
            data = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in args[1])
            args[1] = [data[: len(data) // 2]]
        elif self.name == "copy_file_range":
            args[2] //= 2
        elif self.name == "sendfile":
            args[3] //= 2
        else:
            return
        self.function(*args, **self.kwargs)


OnCall = Callable[[Call], None]


class Watch:
    """Within the block, tells `on_call` of each call of these names on anything at or under `top`, before it is made.

    Calls are numbered in their order, those of all threads together. What is written through Python's file objects
    counts too. What libraries write without Python (torch.save, safetensors) is seen when it opens nothing through us:
    not at all.
    """

    def __init__(self, top: Path, names: Collection[str], on_call: OnCall) -> None:
        self._top = os.path.realpath(top)
        self._names = frozenset(names)
        self._on_call = on_call
        self._lock = threading.RLock()
        self.count = 0

    def __enter__(self) -> Watch:
        self._stack = ExitStack()
        for name in self._names:
            for module in (os, fcntl):
                if name not in ("open", "create") and hasattr(module, name):
                    self._put(module, name, self._counted(name, getattr(module, name)))
        self._put(os, "open", self._os_open(os.open))
        for module in (io, _io, builtins):
            self._put(module, "open", self._open(io.open if module is io else module.open))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _put(self, module: Any, name: str, function: Any) -> None:
        # Some ask what a function can do by looking for it there.
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if getattr(module, name) in able:
                able.add(function)
        self._stack.enter_context(mock.patch.object(module, name, function))

    def call(self, name: str, path: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call, and tell of it before."""
        if name in self._names and self._is_watched(path):
            with self._lock:
                call = Call(self.count, name, path, function, args, kwargs)
                self.count += 1
                self._on_call(call)
        return function(*args, **kwargs)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # These are about two files: the one that is written to, if it is one of those that are watched, or the other.
        order = {"copy_file_range": (1, 0), "splice": (1, 0), "sendfile": (0, 1)}.get(name, (0,))

        def counted(*args: Any, **kwargs: Any) -> Any:
            paths = [path_of(args[at] if len(args) > at else kwargs.get("path", "."), kwargs) for at in order]
            path = next(filter(self._is_watched, paths), "")
            return self.call(name, path, function, *args, **kwargs)

        return counted

    def _is_watched(self, path: str) -> bool:
        return (path + "/").startswith(self._top + "/")

    def _os_open(self, function: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            name = "create" if flags & _MAY_CHANGE else "open"
            fd: int = self.call(name, path_of(path, kwargs), function, path, flags, *args, **kwargs)
            return fd

        return opened

    def _open(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            where = path_of(file, {})
            changing = bool(set(mode) & set("wax+"))
            if not self._is_watched(where):
                return function(file, mode, buffering, *args, **kwargs)
            name = "create" if changing else "open"
            if not changing or "+" in mode:
                return self.call(name, where, function, file, mode, buffering, *args, **kwargs)
            return self.call(name, where, self._writable, where, file, mode, *args, **kwargs)

        return opened

    def _writable(
        self,
        where: str,
        file: Any,
        mode: str,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        raw = _CountedFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.watch, raw.where = self, where
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class _CountedFile(io.FileIO):
    watch: Watch
    where: str

    def write(self, data: Any) -> int:
        written: int = self.watch.call("write", self.where, super().write, data)
        return written


def path_of(file: Any, kwargs: dict[str, Any]) -> str:
    """The path of what a call is about: a path, perhaps below `dir_fd` or `src_dir_fd`, or a descriptor."""
    try:
        if hasattr(file, "fileno"):
            file = file.fileno()
        if isinstance(file, int):
            return _readlink(f"/proc/self/fd/{file}")
        folder = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
        base = os.getcwd() if folder is None else _readlink(f"/proc/self/fd/{folder}")
        path = os.path.normpath(os.path.join(base, os.fsdecode(file)))
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    except (OSError, TypeError, ValueError):
        return ""


_readlink = os.readlink


def nothing(call: Call) -> None:
    """Let every call be made."""


def noted(act: Callable[[], object], top: Path, names: Collection[str] = CHANGES) -> list[str]:
    """What an undisturbed run calls, in order: the names of the calls, each with that of its file."""
    found: list[str] = []
    with Watch(top, names, lambda call: found.append(f"{call.name} {os.path.basename(call.path)}")):
        act()
    return found


def kill_at(number: int, within: bool = False) -> OnCall:
    """Kill the process just before a call, or when half of its bytes are written."""

    def on_call(call: Call) -> None:
        if call.number == number:
            if within:
                call.half()
            os.kill(os.getpid(), signal.SIGKILL)

    return on_call


def fail_at(number: int, code: int) -> OnCall:
    """Have one call fail with an errno."""

    def on_call(call: Call) -> None:
        if call.number == number:
            raise OSError(code, os.strerror(code), call.path)

    return on_call


def fail_all(code: int = errno.ENOLCK) -> OnCall:
    """Have every call fail that is watched."""

    def on_call(call: Call) -> None:
        raise OSError(code, os.strerror(code), call.path)

    return on_call
