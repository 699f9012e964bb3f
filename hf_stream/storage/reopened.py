"""Bytes of a local file that is open only while it is read or written: for more files than a process may have open."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Literal, NoReturn

from hf_stream.errors import CopyError
from hf_stream.storage.file import FileIdentity, FileStorage


class ReopenedFile(FileStorage):
    """A local file that is opened anew each time.

    Nothing holds it: a file that was opened to read must stay where it is, and as it is.

    Args:
        path: An existing file.
        mode: "r" to read, "r+" to read and write.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Literal["r", "r+"] = "r") -> None:
        super().__init__(path, mode)
        self._access = os.O_RDONLY if mode == "r" else os.O_RDWR
        # What this object writes changes only the time, and the file has its size from the beginning.
        self._identity = FileIdentity.of(os.fstat(self._fd))
        self.close()

    def fileno(self) -> NoReturn:
        """Not to be had: use `descriptor`."""
        raise ValueError(f"'{self.name}' is not open for longer than it is used")

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """A descriptor of the very file, which is closed afterwards.

        Raises:
            CopyError: The file was replaced or changed since.
        """
        try:
            fd = os.open(self.name, self._access | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CopyError(f"'{self.name}' went away while it was in use. Open the checkpoint again.") from None
        try:
            now, then = FileIdentity.of(os.fstat(fd)), self._identity
            if now[:3] != then[:3] or (self._access == os.O_RDONLY and now != then):
                raise CopyError(
                    f"'{self.name}' was replaced or changed while it was in use. Open the checkpoint again."
                )
            yield fd
        finally:
            os.close(fd)

    @property
    def identity(self) -> Hashable:
        """That of the file when it was opened."""
        return self._identity
