"""Bytes that outlive a loss of power: files and directories forced to the disk, and pages dropped to read them back."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

from hf_stream.errors import ArgumentError, ArgumentTypeError

# Some file systems cannot flush a directory, or have nothing to flush: then there is nothing more to be done.
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EROFS)
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_SECONDS_BETWEEN = 0.05
_REST = 10


def is_durable(durable: bool | None) -> bool:
    """What `durable=` of a saving function means: None is True, unless the environment has HF_STREAM_DURABLE=0.

    Raises:
        ArgumentTypeError: It is neither a bool nor None.
        ArgumentError: The environment says neither yes nor no.
    """
    if durable is not None:
        if not isinstance(durable, bool):
            raise ArgumentTypeError(f"durable= is {durable!r:.100}; pass True, False or None")
        return durable
    word = os.environ.get("HF_STREAM_DURABLE", "1")
    if word.lower() not in _WORDS:
        raise ArgumentError(f"HF_STREAM_DURABLE is '{word}'; set it to 1 or 0")
    return _WORDS[word.lower()]


@cache
def boot_id() -> str:
    """Another text after each start of the machine; where the system has none, another one in each process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def flush(path: str | os.PathLike[str], dir_fd: int | None = None) -> None:
    """Wait until a file's bytes, or a directory's entries, are on the disk.

    Args:
        path: The file or directory. It is not followed if it is a link.
        dir_fd: An open directory that the path is relative to.

    Raises:
        OSError: They cannot be written. Some of what was written before is lost.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, os.O_RDONLY | flags, dir_fd=dir_fd)
    except PermissionError:
        try:
            fd = os.open(path, os.O_WRONLY | flags, dir_fd=dir_fd)
        except (PermissionError, IsADirectoryError):
            if stat.S_ISDIR(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode):
                return  # one that may be written to and not read, such as a drop box
            raise
    try:
        flush_open(fd)
    finally:
        os.close(fd)


def flush_open(fd: int) -> None:
    """`flush` for an open descriptor."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise


def flush_tree(directory: Path, flushed: Collection[str] = ()) -> None:
    """Flush all regular files and directories under a directory, and itself.

    Args:
        directory: Nothing in it may be written to meanwhile.
        flushed: Files that are on the disk already, relative to it.

    Raises:
        OSError: Something cannot be written, or read.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(directory, topdown=False, onerror=fail):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path) and os.path.relpath(path, directory) not in flushed:
                flush(path)
        flush(folder)


def drop_pages(path: str | os.PathLike[str]) -> None:
    """Have the next reader of a flushed file get its bytes from the disk and not from memory; best effort."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Writeback:
    """Has the kernel write files to the disk while they are being filled, so that a `flush` at the end is short.

    A thread of its own looks at the files from `add` until `close`. It only ever speeds things up: where the system
    cannot do it, nothing happens.
    """

    def __init__(self) -> None:
        self._start_writing = _sync_file_range()
        self._paths: set[Path] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def add(self, path: Path) -> None:
        """Look after a file that is about to be filled."""
        with self._lock:
            self._paths.add(path)
            if self._thread is None and self._start_writing is not None:
                thread = threading.Thread(target=self._run, name="hf_stream writeback", daemon=True)
                with suppress(RuntimeError):  # the interpreter ends, or there are too many
                    thread.start()
                    self._thread = thread

    def remove(self, path: Path) -> None:
        """Look no longer after a file."""
        with self._lock:
            self._paths.discard(path)

    def stop(self) -> None:
        """Stop soon; in a forked child, which has no such thread, do nothing."""
        if self._process == os.getpid():  # another thread may have held the event's lock when the child was forked
            self._closing.set()

    def close(self) -> None:
        """Stop; no file is looked at any more."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._start_writing is not None
        pause = _SECONDS_BETWEEN
        while not self._closing.wait(pause):
            began = time.monotonic()
            with self._lock:
                paths = list(self._paths)
            for path in paths:
                if self._closing.is_set():
                    return
                try:
                    # Not held open: there may be more files than a process may have open.
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                except OSError:  # it has its final name, or went away; too many are open
                    continue
                try:
                    self._start_writing(fd, 0, 0, _START_WRITING)
                finally:
                    os.close(fd)
            # With thousands of files a look at all of them takes a while: most of the time is for the work itself.
            pause = max(_SECONDS_BETWEEN, _REST * (time.monotonic() - began))


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call of Linux that starts to write a file's changed pages and does not wait for them."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        call.restype = ctypes.c_int
    return call
