"""A directory that one process at a time works in."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

_LOCK = "lock"
# Some network file systems have no locks: better to save there without one than not at all.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Others may remove it between two steps of ours again and again, but not for that long: then it cannot be made at all.
_PATIENCE_SECONDS = 2.0


class WorkDirectory:
    """A directory, made if need be, that is locked until `close`, or until the process ends, however it ends.

    Args:
        path: Where it is to be. Parents are made as well, and those made here go again with `close(remove=True)`.

    Raises:
        BlockingIOError: Somebody else, be it in this process, works in it.
        OSError: It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._made = [parent for parent in path.parents if not parent.exists()]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._fd < 0:
            try:
                path.mkdir(parents=True, exist_ok=True)
                fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except (FileNotFoundError, FileExistsError):
                if time.monotonic() > deadline or _is_no_directory(path):
                    raise
                continue  # its last user has just removed the directory
            self._fd = self._lock(fd)

    def _lock(self, fd: int) -> int:
        """The descriptor if it holds the lock, or -1 if the last user removed the file before this one locked it."""
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if _is_at(fd, self.path / _LOCK):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return -1

    @property
    def closed(self) -> bool:
        """Whether somebody else may work in it."""
        return self._fd < 0

    def close(self, *, remove: bool) -> None:
        """Let go of the directory.

        Args:
            remove: Whether it goes, with all that is in it.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if remove:
                self._remove()
        finally:
            # A child process that was forked meanwhile shares the lock: closing alone would leave it locked.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close(remove=False)

    def _remove(self) -> None:
        for name in os.listdir(self.path):
            if name != _LOCK:
                remove_tree(self.path / name)
        # From here on the next user may be at work in the directory: nothing of it is touched any more.
        (self.path / _LOCK).unlink(missing_ok=True)
        for directory in (self.path, *self._made):
            try:
                directory.rmdir()
            except OSError:  # somebody uses it
                return


def remove_tree(path: Path) -> None:
    """Remove a file, or a directory with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_no_directory(path: Path) -> bool:
    """Whether something else stands there; one look, as a directory may go between two."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return not (path.is_dir() if stat.S_ISLNK(mode) else stat.S_ISDIR(mode))


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
