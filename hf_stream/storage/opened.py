"""A file that was opened: its descriptor is held while the process has few, else opened anew for each use."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hf_stream.errors import CopyError, HfStreamError
from hf_stream.formats.regular_files import open_regular


class FileIdentity(NamedTuple):
    """What tells a file, and its state, from another; equal identities mean the same unchanged file."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """That of the file which has this status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Descriptor:
    """An open descriptor, closed when nothing refers to it any more: so never while another thread uses it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)


class OpenedFile:
    """A local file, of which `descriptor` gives a descriptor as often as one is needed.

    Args:
        name: What errors call the file, and the path to it.
        fd: The descriptor that it was opened with; it belongs to this object from now on.
        flags: What it was opened with: `os.O_RDONLY` or `os.O_RDWR`.
        hold: Whether the descriptor may stay open.

    Attributes:
        path: The absolute path.
        identity: The file's identity when it was opened.
    """

    def __init__(self, name: str, fd: int, flags: int, hold: bool) -> None:
        opened = Descriptor(fd)
        self._name = name
        self._flags = flags
        # Not `abspath`: "link/.." is not where it looks to be.
        self.path = name if os.path.isabs(name) else os.path.join(os.getcwd(), name)
        self.identity = FileIdentity.of(os.fstat(fd))
        self._held = opened if hold and _are_few(fd) else None
        self._closed = False

    def close(self) -> None:
        """Close the descriptor once nobody uses it; there is no other from then on."""
        self._closed = True
        self._held = None

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """A descriptor of the very file, open as long as the context is.

        Raises:
            CopyError: The file was closed, or is not held open and was replaced or, if it was opened to be read,
                changed since.
        """
        held = self._held
        if held is not None:
            yield held.number
            return
        if self._closed:
            raise is_closed(self._name)
        fd = self._open_again()
        try:
            yield fd
        finally:
            os.close(fd)

    def check_unchanged(self) -> None:
        """Refuse a file that is not as it was when it was opened.

        Raises:
            CopyError: It was changed. One that was deleted, or replaced, is as it was if it is held open.
        """
        with self.descriptor() as fd:
            status = os.fstat(fd)
        now, then = FileIdentity.of(status), self.identity
        # Losing its last name alone gives a file a new ctime.
        if now[:4] != then[:4] or (now != then and status.st_nlink):
            raise self._changed("was changed")

    def _open_again(self) -> int:
        try:
            fd = open_regular(self.path, self._flags)
        except HfStreamError:
            raise
        except FileNotFoundError:
            raise self._changed("went away") from None
        now, then = FileIdentity.of(os.fstat(fd)), self.identity
        # What is written through this object changes the times.
        if now[:2] != then[:2] or (self._flags == os.O_RDONLY and now != then):
            os.close(fd)
            raise self._changed("was replaced or changed")
        return fd

    def _changed(self, fact: str) -> CopyError:
        return CopyError(f"'{self._name}' {fact} while it was in use. Open the checkpoint again.")


def is_closed(name: str) -> CopyError:
    """The error for a file that is read after it was closed."""
    return CopyError(
        f"'{name}' was closed, and with it the checkpoint that it belongs to. Materialize its tensors before that, "
        "inside the with block, or open the checkpoint again."
    )


def _are_few(fd: int) -> bool:
    """Whether a process that has just got this descriptor has few: systems give the lowest number that is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit == resource.RLIM_INFINITY or fd < limit // 2
