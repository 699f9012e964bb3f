"""A directory that one process at a time works in, and that leads nowhere else: links in it are refused."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from hf_stream.errors import CheckpointError
from hf_stream.storage.durability import flush

WORK_SUFFIX = ".hf-stream"
LOCK = "lock"
"""The file in it that is locked."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Some network file systems have no locks: better to save there without one than not at all.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Others may remove it between two steps of ours again and again, but not for that long: then it cannot be made at all.
_PATIENCE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class WorkDirectory:
    """A directory, made if need be, that is locked until `close`, or until the process ends, however it ends.

    What is there already may come from anywhere, a download for one: the directory and its lock are opened without
    following links. A child process that was forked meanwhile cannot close or empty it.

    Args:
        path: Where it is to be. Parents are made as well, and those made here go again with `close(remove=True)`.

    Attributes:
        fd: The open directory; -1 when it is closed.

    Raises:
        BlockingIOError: Somebody else, be it in this process, works in it.
        CheckpointError: There is something that we do not leave there, such as a link.
        OSError: It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self._lock = -1
        self._process = os.getpid()
        self._made = [parent for parent in path.parents if not parent.exists()]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        try:
            while not self._open():
                if time.monotonic() > deadline:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        except BlockingIOError:
            raise
        except BaseException:
            with suppress(OSError):  # somebody uses it, or it was not made
                self.path.rmdir()
            self._remove_made()
            raise

    def _open(self) -> bool:
        """Make, open and lock the directory; False if its last user has just removed it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:
            return False
        except FileExistsError:
            pass  # `open` says what is there
        fd = lock = -1
        try:
            try:
                fd = os.open(self.path, _DIRECTORY)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                lock = os.open(LOCK, flags, 0o666, dir_fd=fd)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise self._explained(error) from None
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise refusal(self.path / LOCK, "is not a regular file")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if not _is_at(lock, LOCK, fd) or not _is_at(fd, self.path):
                return False
            self.fd, self._lock, fd, lock = fd, lock, -1, -1
            return True
        finally:
            for descriptor in (fd, lock):
                if descriptor >= 0:
                    os.close(descriptor)

    def _explained(self, error: OSError) -> Exception:
        """What stands there in place of our directory or its lock, if that is why it cannot be opened."""
        for path, kind in ((self.path, stat.S_ISDIR), (self.path / LOCK, stat.S_ISREG)):
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                continue
            if stat.S_ISLNK(mode):
                return refusal(path, f"is a link to '{os.readlink(path)}'")
            if not kind(mode):
                return refusal(path, "is not a directory" if path == self.path else "is not a regular file")
        return error

    @property
    def closed(self) -> bool:
        """Whether somebody else may work in it."""
        return self.fd < 0

    @property
    def is_ours(self) -> bool:
        """Whether this process opened it, and is not a child that was forked since."""
        return self._process == os.getpid()

    def check_contents(self, files: frozenset[str], directories: frozenset[str], *, inside: bool = True) -> None:
        """Refuse what no earlier run of ours can have left.

        Args:
            files: Names of regular files that may be there.
            directories: Names of directories that may be there.
            inside: Whether these may hold regular files and directories alone.

        Raises:
            CheckpointError: Something else is there.
        """
        with os.scandir(self.fd) as entries:
            for entry in entries:
                path = self.path / entry.name
                if entry.name in directories and entry.is_dir(follow_symlinks=False):
                    if inside:
                        _check_tree(path)
                elif entry.name not in (*files, LOCK) or not entry.is_file(follow_symlinks=False):
                    raise refusal(path, "is a link" if entry.is_symlink() else "is not of a kind that belongs there")

    def close(self, *, remove: bool) -> None:
        """Let go of the directory; in a forked child, only close what it has inherited.

        Args:
            remove: Whether it goes, with all that is in it. What cannot be removed is said in a warning.
        """
        fd, self.fd = self.fd, -1
        lock, self._lock = self._lock, -1
        if fd < 0:
            return
        try:
            if self.is_ours:
                if remove:
                    self._remove(fd)
                # A child process that was forked meanwhile shares the lock: closing alone would leave it locked.
                fcntl.flock(lock, fcntl.LOCK_UN)
        except OSError as error:
            # The work itself is done, or has failed for a reason of its own, which must not be hidden by this one.
            if error.errno not in _NO_LOCKS:
                logger.warning("'%s' cannot be removed: %s; it can be deleted by hand", self.path, error.strerror)
        finally:
            os.close(lock)
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close(remove=False)

    def flush_parents(self) -> None:
        """Wait until the directory itself, and parents made for it, are on the disk."""
        # One of them may be a link.
        for directory in dict.fromkeys(os.path.realpath(path.parent) for path in (self.path, *self._made)):
            flush(directory)

    def _remove(self, fd: int) -> None:
        for name in os.listdir(fd):
            if name != LOCK:
                remove_tree(name, fd)
        # From here on the next user may be at work in the directory: nothing of it is touched any more.
        os.unlink(LOCK, dir_fd=fd)
        try:
            self.path.rmdir()
        except OSError:  # somebody uses it
            return
        self._remove_made()

    def _remove_made(self) -> None:
        for directory in self._made:
            try:
                directory.rmdir()
            except OSError:  # it was not made after all, or somebody uses it
                return


def work_path(directory: Path, file: str | None = None) -> Path:
    """Where the work directory of a destination is.

    Args:
        directory: The destination's.
        file: Its name in there, if it is one file.
    """
    if file is not None:
        return directory / f".{file}{WORK_SUFFIX}"
    return directory / WORK_SUFFIX if directory.is_dir() else work_beside(directory)


def work_beside(directory: Path) -> Path:
    """Where the work directory of a destination is that does not exist yet."""
    return directory.parent / f".{directory.name}{WORK_SUFFIX}"


def remove_tree(path: str | os.PathLike[str], dir_fd: int | None = None) -> None:
    """Remove a file, a link or a directory with all that is in it, if it is there; links are not followed.

    Args:
        path: What to remove.
        dir_fd: An open directory that the path is relative to.
    """
    try:
        if stat.S_ISDIR(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            shutil.rmtree(path, dir_fd=dir_fd)
        else:
            os.unlink(path, dir_fd=dir_fd)
    except FileNotFoundError:
        pass


def remove_empty_folders(directory: Path) -> None:
    """Remove the folders below a directory in which there is nothing."""
    for folder, _, _ in os.walk(directory, topdown=False):
        if folder != os.fspath(directory):
            with suppress(OSError):  # which has something in it
                os.rmdir(folder)


def refusal(path: Path, fact: str) -> CheckpointError:
    """The error for something in a work directory that hf_stream does not leave there."""
    return CheckpointError(
        f"'{path}' {fact}: hf_stream did not create it and leaves it alone. Look at it, then remove it: "
        f"hf-stream clean '{_checkpoint_of(path)}', or hf_stream.checkpoint.clean"
    )


def _checkpoint_of(path: Path) -> Path:
    """The checkpoint that a work directory, or something in it, belongs to."""
    for work in (path, *path.parents):
        if work.name.endswith(WORK_SUFFIX):
            name = work.name.removesuffix(WORK_SUFFIX)
            return work.with_name(name[1:]) if len(name) > 1 and name.startswith(".") else work.parent
    return path


def _check_tree(directory: Path) -> None:
    todo = [directory]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    raise refusal(Path(entry.path), "is a link" if entry.is_symlink() else "is not a regular file")


def _is_at(fd: int, path: str | os.PathLike[str], dir_fd: int | None = None) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, dir_fd=dir_fd, follow_symlinks=False))
    except FileNotFoundError:
        return False
