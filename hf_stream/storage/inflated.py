"""A compressed part of a file as a file of its own, inflated to scratch space when it is first needed."""

from __future__ import annotations

import os
import tempfile
import threading
import zlib
from collections.abc import Hashable, Iterator

from hf_stream.errors import FormatError
from hf_stream.storage.file import FileStorage, reserve_space

_CHUNK = 1 << 20


def inflate(source: FileStorage, start: int, stored_nbytes: int, nbytes: int, name: str) -> Iterator[bytes]:
    """Inflate raw deflate data piece by piece, each piece a MiB at most.

    Args:
        source: The file that holds it.
        start: Its first byte.
        stored_nbytes: The bytes that it takes.
        nbytes: The size that its content must have.
        name: What errors call it.

    Raises:
        FormatError: The data is damaged, or its content has another size.
    """
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    left, done = stored_nbytes, 0
    pending = b""
    while not inflater.eof:
        if not pending:
            if not left:
                break
            chunk = bytearray(min(left, _CHUNK))
            source.read_into(memoryview(chunk), start + stored_nbytes - left)
            left -= len(chunk)
            pending = bytes(chunk)
        try:
            piece = inflater.decompress(pending, _CHUNK)
        except zlib.error as error:
            raise FormatError(f"{name}: the compressed data is damaged ({error}). Get the file again.") from None
        pending = inflater.unconsumed_tail
        done += len(piece)
        if done > nbytes:
            break
        yield piece
    if done != nbytes or not inflater.eof or left or inflater.unused_data:
        raise FormatError(
            f"{name}: the compressed data does not give the {nbytes} bytes it should. Get the file again."
        )


class InflatedFile(FileStorage):
    """The content of a compressed part of a file.

    On first use it is inflated to a file in the directory for temporary files (`TMPDIR`), which has no name and goes
    away with this object. Its space is reserved before anything is written.

    Args:
        source: The file that holds the part.
        start: Its first byte.
        stored_nbytes: The bytes that it takes.
        nbytes: The size of its content.
        crc32: Of the content; 0 if it is not known.
        name: What errors call it.
    """

    def __init__(self, source: FileStorage, start: int, stored_nbytes: int, nbytes: int, crc32: int, name: str) -> None:
        self.name = name
        self.nbytes = nbytes
        self._source = source
        self._part = start, stored_nbytes
        self._crc32 = crc32
        self._place = ("inflated", source.place, start)
        self._mapping = None
        self._fd = -1
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give the scratch space back; tensors from `alias` and `window` stay valid."""
        self._closed = True
        super().close()

    def fileno(self) -> int:
        """The descriptor of the scratch file, which is made now if it is not there."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.name} is closed")
            if self._fd < 0:
                self._fd = self._inflated()
            return self._fd

    @property
    def identity(self) -> Hashable:
        """That of the file which holds the part, and the part."""
        return self._source.identity, self._part

    def _inflated(self) -> int:
        fd, path = tempfile.mkstemp(prefix="hf-stream-")
        try:
            os.unlink(path)
            reserve_space(fd, self.nbytes, f"{path} (to inflate {self.name})")
            crc32 = at = 0
            for piece in inflate(self._source, *self._part, self.nbytes, self.name):
                crc32 = zlib.crc32(piece, crc32)
                view = memoryview(piece)
                while view:
                    written = os.pwrite(fd, view, at)
                    at, view = at + written, view[written:]
            if self._crc32 not in (0, crc32):
                raise FormatError(
                    f"{self.name}: its CRC-32 is {crc32:#010x}, the file says {self._crc32:#010x}. Get the file again."
                )
        except BaseException:
            os.close(fd)
            raise
        return fd
