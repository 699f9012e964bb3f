"""Bytes of a local file, through its descriptor."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from hf_stream.errors import CopyError
from hf_stream.formats.regular_files import open_regular
from hf_stream.storage.base import Storage
from hf_stream.storage.opened import FileIdentity, OpenedFile

# What one call of preadv and pwritev takes at most (IOV_MAX on Linux and macOS).
MAX_BUFFERS = 1024

_CHUNK = 1 << 20
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_NO_COPY_FILE_RANGE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


class FileStorage(Storage):
    """A local file, always the very one that was opened.

    Its descriptor is held while the process has few (half of what `ulimit -n` allows): renaming or replacing the path
    then changes nothing. Of more files none is held; one that was renamed, replaced or changed is then an error.

    Args:
        path: An existing file.
        mode: "r" to read, "r+" to read and write; the size stays as it is.
        hold: Whether the descriptor may be held.

    Raises:
        CheckpointError: It is no regular file.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Literal["r", "r+"] = "r", *, hold: bool = True) -> None:
        flags = {"r": os.O_RDONLY, "r+": os.O_RDWR}[mode]
        self._open(os.fspath(path), open_regular(path, flags), flags, hold)

    @classmethod
    def create(cls, path: str | os.PathLike[str], nbytes: int) -> FileStorage:
        """Create a new file of `nbytes` zero bytes with its space reserved, open for reading and writing.

        The mode is what the umask says. If anything fails, no file is left behind.

        Raises:
            FileExistsError: something is there already, were it a dangling symbolic link.
            OSError: ENOSPC if the space is not there.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, 0o666)
        storage = cls.__new__(cls)
        try:
            reserve_space(fd, nbytes, os.fspath(path))
        except BaseException:
            os.close(fd)
            Path(path).unlink()
            raise
        storage._open(os.fspath(path), fd, os.O_RDWR, hold=True)
        return storage

    def _open(self, name: str, fd: int, flags: int, hold: bool) -> None:
        self.name = name
        self._mapping: Any = None  # an UntypedStorage; torch's stubs do not know that it slices
        self._file = OpenedFile(name, fd, flags, hold)
        identity = self._file.identity
        self.nbytes = identity.nbytes
        self._place: Hashable = ("file", identity.device, identity.inode)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, nbytes={self.nbytes})"

    def __enter__(self) -> FileStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor once nobody uses it; tensors from `alias` and `window` stay valid."""
        self._mapping = None
        self._file.close()

    def descriptor(self) -> AbstractContextManager[int]:
        """A descriptor that is open as long as the context is.

        Raises:
            CopyError: The file is not held open, and was replaced or changed.
        """
        return self._file.descriptor()

    def check_unchanged(self) -> None:
        """Refuse a file that is not as it was when it was opened.

        Raises:
            CopyError: It was changed, or it is not held open and was replaced.
        """
        self._file.check_unchanged()

    @property
    def path(self) -> str:
        """Where the file was when it was opened, as an absolute path."""
        return self._file.path

    @property
    def place(self) -> Hashable:
        """Device and inode: other names of the file are the same place."""
        return self._place

    @property
    def identity(self) -> Hashable:
        """The file's `FileIdentity` as it is now."""
        with self.descriptor() as fd:
            return FileIdentity.of(os.fstat(fd))

    def fsync(self) -> None:
        """Wait until what was written is on the disk."""
        with self.descriptor() as fd:
            os.fsync(fd)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from the file at `offset`."""
        self.read_scattered([buffer], offset)

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write `buffer` to the file at `offset`."""
        self.write_gathered([buffer], offset)

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill `buffers` one after the other, many with one system call."""
        self._transfer(os.preadv, buffers, offset)

    def write_gathered(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write `buffers` one after the other, many with one system call."""
        self._transfer(os.pwritev, buffers, offset)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], buffers: Sequence[memoryview], offset: int
    ) -> None:
        """Repeat the system call until every byte has moved; Python itself repeats it after a signal (EINTR)."""
        pending = [buffer for buffer in buffers if len(buffer)]
        with self.descriptor() as fd:
            while pending:
                batch = pending[:MAX_BUFFERS]
                moved = call(fd, batch, offset)
                if moved == 0:
                    wanted = offset + sum(map(len, pending))
                    raise CopyError(
                        f"'{self.name}' ends at byte {os.fstat(fd).st_size}, bytes {offset} to {wanted} were wanted. "
                        "The file is truncated or was changed while in use."
                    )
                offset += moved
                done = 0
                while done < len(batch) and moved >= len(batch[done]):
                    moved -= len(batch[done])
                    done += 1
                pending = pending[done:]
                if moved:
                    pending[0] = pending[0][moved:]

    def copy_to(self, target: FileStorage, offset: int, target_offset: int, nbytes: int) -> int:
        """Copy bytes to another file inside the kernel, as many as it does in one go.

        Returns:
            Bytes copied; 0 if this pair of files needs to be copied through a buffer.
        """
        if not hasattr(os, "copy_file_range"):
            return 0
        try:
            with self.descriptor() as fd, target.descriptor() as target_fd:
                return os.copy_file_range(fd, target_fd, nbytes, offset, target_offset)
        except OSError as error:
            if error.errno in _NO_COPY_FILE_RANGE:
                return 0
            raise

    def window(
        self, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], writable: bool = False
    ) -> torch.Tensor | None:
        """A tensor on a mapping of just the pages it needs, unmapped when the tensor dies.

        The caller must not let the file shrink meanwhile: touching a lost page kills the process.
        """
        if offset % dtype.itemsize:
            return None
        if 0 in size:
            return torch.empty(0, dtype=dtype, device="cpu").as_strided(tuple(size), tuple(stride))
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        stop = offset + elements * dtype.itemsize
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        # A private mapping is writable for torch.frombuffer's sake; nobody writes, so it stays page cache.
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        with self.descriptor() as fd:
            self._check_has(offset, stop, fd)
            pages = mmap.mmap(fd, stop - start, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
        flat = torch.frombuffer(pages, dtype=torch.uint8, offset=offset - start, count=stop - offset)
        return flat.view(dtype).as_strided(tuple(size), tuple(stride))

    def alias(self, offset: int, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor | None:
        """A contiguous CPU tensor on the file's pages: nothing is read until touched, writes stay private to it.

        The file is mapped once; each tensor has a torch storage of its own and keeps the mapping alive.

        Returns:
            None if `offset` is not a multiple of the dtype's size.
        """
        if offset % dtype.itemsize:
            return None
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        count = 1
        for n in size:
            count *= n
        if count == 0:
            return tensor.reshape(tuple(size))
        with self.descriptor() as fd:
            self._check_has(offset, offset + count * dtype.itemsize, fd)
            if self._mapping is None:
                # Through the descriptor, not the path, so that a file put in its place is never read.
                self._mapping = torch.UntypedStorage.from_file(f"/dev/fd/{fd}", shared=False, nbytes=self.nbytes)
        part = self._mapping[offset : offset + count * dtype.itemsize]
        tensor.set_(part, 0, (count,), (1,))
        return tensor.view(tuple(size))

    def _check_has(self, start: int, stop: int, fd: int) -> None:
        """Refuse to map bytes that are not there: to touch them would end the process."""
        if os.fstat(fd).st_size < stop:
            raise CopyError(f"'{self.name}' ends before byte {stop}: bytes {start} to {stop} were wanted.")


def reserve_space(fd: int, nbytes: int, name: str, start: int = 0) -> None:
    """Give a file bytes that it did not have, and their space: a full disk is an error now and not in mid-copy.

    Raises:
        OSError: ENOSPC, naming the file, if the space is not there.
    """
    if nbytes == 0:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, start, nbytes)
            return
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise OSError(error.errno, os.strerror(error.errno or 0), name) from None
    free = os.fstatvfs(fd)
    if free.f_bavail * free.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    os.ftruncate(fd, max(start + nbytes, os.fstat(fd).st_size))


def copy_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a file's bytes to a new file. Its holes stay holes: a small file cannot fill the disk.

    Raises:
        CheckpointError: The source is no regular file.
        OSError: It cannot be read, or the target is there already or cannot be written.
    """
    with open(open_regular(source), "rb", buffering=0) as old, open(target, "xb", buffering=0) as new:
        for start, stop in _filled(old.fileno()):
            while start < stop and (data := os.pread(old.fileno(), min(stop - start, _CHUNK), start)):
                start += os.pwrite(new.fileno(), data, start)
        os.ftruncate(new.fileno(), os.fstat(old.fileno()).st_size)


def _filled(fd: int) -> Iterator[tuple[int, int]]:
    """Where a file has bytes, from one to the other; all of it where the system cannot tell."""
    at, nbytes = 0, os.fstat(fd).st_size
    while at < nbytes:
        start, stop = at, nbytes
        if hasattr(os, "SEEK_DATA"):
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return  # a hole up to the end
            stop = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, stop
        at = stop
