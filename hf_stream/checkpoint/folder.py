"""An open directory whose files, and those in folders below it, are reached without following links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import NamedTuple

from hf_stream.errors import CheckpointError
from hf_stream.storage.durability import flush_open

# In bytes; file systems take no longer ones.
_MAX_NAME = 255
_MAX_PATH = 4000
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FileState(NamedTuple):
    """What tells a file from one that was put in its place; copies that keep times (`cp -a`, `rsync -a`) keep it."""

    nbytes: int
    mtime_ns: int


class Folder:
    """A directory; use it in a `with` block.

    All names are relative to it, with "/" between folders, and have passed `is_inside`.

    Args:
        path: The directory.
        follow: Whether it may be a link itself.

    Attributes:
        fd: The open directory.
    """

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        self.path = path
        self.fd = os.open(path, _OPEN & ~os.O_NOFOLLOW if follow else _OPEN)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def state(self, name: str) -> FileState | None:
        """That of a file, or of a link itself; None if nothing is there.

        Raises:
            CheckpointError: A directory, or a folder that is none, is in the way.
        """
        try:
            with self._parent(name) as fd:
                status = os.stat(_leaf(name), dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"'{self.path / name}' is a directory where a file is to be; move it away")
        return FileState(status.st_size, status.st_mtime_ns)

    def mode(self, name: str) -> int | None:
        """The permissions of a regular file, through links; None if there is none."""
        with suppress(FileNotFoundError), self._parent(name) as fd:
            status = os.stat(_leaf(name), dir_fd=fd)
            if stat.S_ISREG(status.st_mode):
                return stat.S_IMODE(status.st_mode)
        return None

    def names(self, folder: str = "") -> list[str]:
        """Names of all files, links and others in one folder, directories left out."""
        try:
            with self._parent(f"{folder}/x" if folder else "x") as fd, os.scandir(fd) as entries:
                found = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return [f"{folder}/{name}" if folder else name for name in found]

    def all_names(self) -> list[str]:
        """Names of all files here and in all folders below.

        Raises:
            CheckpointError: There is a link, a pipe or the like, which no folder of our own holds.
        """
        found, todo = [], [""]
        while todo:
            inner = todo.pop()
            with os.scandir(self.path / inner) as entries:
                for entry in entries:
                    name = f"{inner}/{entry.name}" if inner else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        found.append(name)
                    else:
                        raise CheckpointError(
                            f"'{entry.path}' is a link, a pipe or the like, which no checkpoint holds"
                        )
        return found

    def make_parents(self, name: str) -> None:
        """Make the folders that a file is to be in."""
        parents = list(PurePosixPath(name).parents)[-2::-1]
        for parent in parents:
            with suppress(FileExistsError), self._parent(str(parent)) as fd:
                os.mkdir(parent.name, dir_fd=fd)
        with self._parent(name):
            pass  # says what else than a folder is there

    def unlink(self, name: str) -> None:
        """Remove a file or a link, if it is there."""
        with suppress(FileNotFoundError), self._parent(name) as fd:
            os.unlink(_leaf(name), dir_fd=fd)

    def take(self, name: str, source: Folder) -> None:
        """Move a file of the same name here from another folder, in place of what is here."""
        with self._parent(name) as fd, source._parent(name) as source_fd:
            os.rename(_leaf(name), _leaf(name), src_dir_fd=source_fd, dst_dir_fd=fd)

    def flush(self, names: Iterable[str]) -> None:
        """Wait until it is on the disk that files of these names are there, or are there no longer."""
        folders = {parent for name in names for parent in PurePosixPath(name).parents}
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            with suppress(FileNotFoundError), self._parent(str(folder / "x")) as fd:
                flush_open(fd)

    @contextmanager
    def _parent(self, name: str) -> Iterator[int]:
        """The open folder that a file is in."""
        *folders, _ = PurePosixPath(name).parts
        fd = self.fd
        try:
            for depth, folder in enumerate(folders):
                try:
                    inner = os.open(folder, _OPEN, dir_fd=fd)
                except NotADirectoryError:
                    where = self.path.joinpath(*folders[: depth + 1])
                    raise CheckpointError(
                        f"'{where}' is {'a link' if where.is_symlink() else 'a file'} where a folder is to be; "
                        "move it away"
                    ) from None
                if fd != self.fd:
                    os.close(fd)
                fd = inner
            yield fd
        finally:
            if fd != self.fd:
                os.close(fd)


def is_inside(name: object) -> bool:
    """Whether something is a name that a `Folder` takes: relative, in its plainest form, and leading nowhere else."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    parts = encoded.split(b"/")
    return len(encoded) <= _MAX_PATH and not any(part in (b"", b".", b"..") or len(part) > _MAX_NAME for part in parts)


def _leaf(name: str) -> str:
    return PurePosixPath(name).name
