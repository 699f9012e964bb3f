"""Compressed records of a file as parts of a scratch file, each inflated when it is first needed."""

from __future__ import annotations

import os
import tempfile
import threading
import zlib
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from hf_stream.errors import ArchiveError
from hf_stream.formats.zip_records import Record
from hf_stream.storage.file import FileStorage, reserve_space
from hf_stream.storage.opened import Descriptor, is_closed

_CHUNK = 1 << 20
# Every dtype is aligned in the scratch file, and no record begins where an empty one does.
_ALIGNMENT = 64


def inflate(source: FileStorage, record: Record) -> Iterator[bytes]:
    """Inflate a record piece by piece, each piece a MiB at most.

    Raises:
        FormatError: The data is damaged, or its content has another size than declared.
    """
    name = f"'{source.name}': record '{record.name}'"
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    left, done = record.stored_nbytes, 0
    pending = b""
    while not inflater.eof:
        if not pending:
            if not left:
                break
            chunk = bytearray(min(left, _CHUNK))
            source.read_into(memoryview(chunk), record.start + record.stored_nbytes - left)
            left -= len(chunk)
            pending = bytes(chunk)
        try:
            piece = inflater.decompress(pending, _CHUNK)
        except zlib.error as error:
            raise ArchiveError(f"{name}: the compressed data is damaged ({error}). Get the file again.") from None
        pending = inflater.unconsumed_tail
        done += len(piece)
        if done > record.nbytes:
            break
        yield piece
    if done != record.nbytes or not inflater.eof or left or inflater.unused_data:
        raise ArchiveError(
            f"{name}: the compressed data does not give the {record.nbytes} bytes it should. Get the file again."
        )


class InflatedFile(FileStorage):
    """The content of a file's compressed records, side by side.

    A record is inflated when a byte of it is first needed, to a file in the directory for temporary files (`TMPDIR`),
    which has no name and goes away with this object. A record's space is reserved before anything of it is written.

    Args:
        source: The file that holds them.
        records: Compressed ones.
    """

    def __init__(self, source: FileStorage, records: Sequence[Record]) -> None:
        self.name = f"{source.name} (inflated)"
        self._source = source
        self._records = records
        sizes = [-(-max(record.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT for record in records]
        self._starts = list(accumulate(sizes, initial=0))[:-1]
        self._there = [False] * len(records)
        self.nbytes = sum(sizes)
        self._place = ("inflated", source.place)
        self._mapping = None
        self._scratch: Descriptor | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start_of(self, number: int) -> int:
        """First byte of the `number`-th record's content."""
        return self._starts[number]

    def close(self) -> None:
        """Give the scratch space back; tensors from `alias` and `window` stay valid."""
        self._closed = True
        self._mapping = None
        self._scratch = None

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """That of the scratch file."""
        scratch = self._made()
        yield scratch.number

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def identity(self) -> Hashable:
        """That of the file which holds the records."""
        return "inflated", self._source.identity

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._need(offset, sum(map(len, buffers)))
        super().read_scattered(buffers, offset)

    def copy_to(self, target: FileStorage, offset: int, target_offset: int, nbytes: int) -> int:
        self._need(offset, nbytes)
        return super().copy_to(target, offset, target_offset, nbytes)

    def window(
        self, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], writable: bool = False
    ) -> torch.Tensor | None:
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        self._need(offset, 0 if 0 in size else elements * dtype.itemsize)
        return super().window(offset, dtype, size, stride, writable)

    def alias(self, offset: int, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor | None:
        self._need(offset, torch.Size(size).numel() * dtype.itemsize)
        return super().alias(offset, dtype, size)

    def _need(self, offset: int, nbytes: int) -> None:
        """Inflate the records that have some of these bytes, as far as they are not there yet."""
        if not nbytes:
            return
        with self._lock:
            scratch = self._made()
            stop = offset + nbytes
            for number in range(max(bisect_right(self._starts, offset) - 1, 0), len(self._records)):
                if self._starts[number] >= stop:
                    break
                if not self._there[number]:
                    self._inflate(self._records[number], self._starts[number], scratch.number)
                    self._there[number] = True

    def _made(self) -> Descriptor:
        """The scratch file, all of it a hole at first."""
        scratch = self._scratch
        if scratch is None:
            if self._closed:
                raise is_closed(self.name)
            fd, path = tempfile.mkstemp(prefix="hf-stream-")
            self._scratch = scratch = Descriptor(fd)
            os.unlink(path)
            os.ftruncate(fd, self.nbytes)
        return scratch

    def _inflate(self, record: Record, start: int, fd: int) -> None:
        reserve_space(fd, record.nbytes, f"{tempfile.gettempdir()} (to inflate {self._source.name})", start)
        crc32, at = 0, start
        for piece in inflate(self._source, record):
            crc32 = zlib.crc32(piece, crc32)
            view = memoryview(piece)
            while view:
                written = os.pwrite(fd, view, at)
                at, view = at + written, view[written:]
        check_crc32(self._source.name, record, crc32)


def check_crc32(name: str, record: Record, crc32: int) -> None:
    """Compare a record's checksum with what the file says, if that says anything.

    Raises:
        FormatError: They differ. Names the record and the file.
    """
    if record.crc32 not in (0, crc32):
        raise ArchiveError(
            f"'{name}': the CRC-32 of record '{record.name}' is {crc32:#010x}, the file says {record.crc32:#010x}. "
            "The file is damaged: get it again."
        )
