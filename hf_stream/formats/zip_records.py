"""The records of a zip archive, such as torch.save writes: where the bytes of each one are in the file.

Everything that the archive says twice must agree, and no two records share a byte. So no other reader of the file can
see something else in it, and what is read in place is what was stored.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, NoReturn

from hf_stream.errors import ArchiveError

ReadAt = Callable[[int, int], bytes]
"""Gives exactly so many bytes from an offset on: (offset, nbytes)."""

SIGNATURE: Final = b"PK\x03\x04"  # how an archive begins

_END: Final = struct.Struct("<4s4H2IH")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64: Final = struct.Struct("<4sIQI")
_ENTRY: Final = struct.Struct("<4s2x3H4x3I4H2x2I")
_LOCAL: Final = struct.Struct("<4s3H4x3I2H")
_FIELD: Final = struct.Struct("<2H")

_MAX16: Final = 0xFFFF
_MAX32: Final = 0xFFFFFFFF
_ZIP64: Final = 1  # the number of the extra field with 64-bit sizes
_DESCRIPTOR: Final = 1 << 3  # sizes and CRC follow the data, and may be 0 in the local header
_KNOWN_FLAGS: Final = _DESCRIPTOR | 1 << 11 | 0b110  # and names in UTF-8, and how well it was compressed
_NEWEST: Final = 63  # version 6.3 of the format
_FOLDER: Final = 0x10  # in the attributes
_STORED: Final = 0
_DEFLATED: Final = 8
_MOST_DEFLATED: Final = 1032  # bytes that one byte can stand for

_DAMAGED: Final = "The file is damaged or not a zip archive that torch wrote: get it again."


class Record(NamedTuple):
    """One record.

    Attributes:
        name: With its folders.
        start: First byte of its data, counted from the start of the file.
        stored_nbytes: Bytes it takes in the file.
        nbytes: Size of its content; larger than `stored_nbytes` if compressed.
        crc32: Of the content; 0 also where the writer has computed none.
        deflated: Whether it is compressed.
    """

    name: str
    start: int
    stored_nbytes: int
    nbytes: int
    crc32: int
    deflated: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the directory says of a record."""

    raw_name: bytes
    flags: int
    method: int
    crc32: int
    stored_nbytes: int
    nbytes: int
    header: int


def read_records(read: ReadAt, file_size: int, name: str) -> dict[str, Record]:
    """Read and check the directory and every local header; reads these and no data.

    Args:
        read: Reads bytes of the file.
        file_size: In bytes.
        name: What errors call the file.

    Returns:
        The records by name, in the order of the directory.

    Raises:
        FormatError: The archive is damaged, ambiguous, encrypted or split, or uses what torch never writes.
    """

    def fail(fact: str) -> NoReturn:
        raise ArchiveError(f"'{name}': {fact}. {_DAMAGED}")

    start, nbytes, count = _find_directory(read, file_size, fail)
    if count * _ENTRY.size > nbytes:
        fail(f"the zip directory says {count} records in {nbytes} bytes")
    entries = _parse_directory(read(start, nbytes), count, fail)
    records: dict[str, Record] = {}
    # Names that differ in case alone are one and the same to torch.
    seen: set[bytes] = set()
    ends: list[tuple[int, int, str]] = []
    for entry in entries:
        try:
            record_name = entry.raw_name.decode()
        except UnicodeDecodeError:
            fail(f"record name {entry.raw_name!r:.200} is not UTF-8")
        if "\0" in record_name:
            # To torch a name ends there: it reads another record.
            fail(f"record name {entry.raw_name!r:.200} has a byte 0")
        if entry.raw_name.lower() in seen:
            fail(f"record '{record_name}' is there twice")
        seen.add(entry.raw_name.lower())
        record = _check_local(read, entry, record_name, start, fail)
        records[record_name] = record
        ends.append((entry.header, record.start + record.stored_nbytes, record_name))
    ends.sort()
    if ends and ends[0][0] != 0:
        fail(f"the first record, '{ends[0][2]}', begins at byte {ends[0][0]}, not 0")
    for (_, stop, one), (header, _, other) in pairwise(ends):
        if stop > header:
            fail(f"records '{one}' and '{other}' overlap: one ends at byte {stop}, the other begins at {header}")
    return records


def _find_directory(read: ReadAt, file_size: int, fail: Callable[[str], NoReturn]) -> tuple[int, int, int]:
    """Where the directory begins, its bytes, and how many records it has; it ends where the end record begins."""
    end = file_size - _END.size
    if end < 0:
        fail(f"{file_size} bytes are too few for a zip archive")
    magic, disk, first_disk, here, count, nbytes, start, comment = _END.unpack(read(end, _END.size))
    if magic != b"PK\x05\x06" or comment:
        fail("the file does not end with the end of a zip directory: it is cut short, or something follows")
    facts = [disk, first_disk, here, count, nbytes, start]
    locator = end - _LOCATOR64.size
    if locator >= _END64.size and read(locator, 4) == b"PK\x06\x07":
        _, locator_disk, end64, disks = _LOCATOR64.unpack(read(locator, _LOCATOR64.size))
        if locator_disk or disks != 1 or end64 + _END64.size != locator:
            fail("the 64-bit end of the zip directory is not where it must be")
        magic, size, _, _, *facts64 = _END64.unpack(read(end64, _END64.size))
        if magic != b"PK\x06\x06" or size != _END64.size - 12:
            fail("the 64-bit end of the zip directory is not one")
        limits = [_MAX16] * 4 + [_MAX32] * 2
        if any(fact not in (wide, limit) for fact, wide, limit in zip(facts, facts64, limits, strict=True)):
            fail("the two ends of the zip directory contradict each other")
        facts, end = facts64, end64
    disk, first_disk, here, count, nbytes, start = facts
    if disk or first_disk or here != count:
        fail("the archive is split over several files")
    if start + nbytes != end:
        fail(f"the zip directory takes bytes {start} to {start + nbytes}, but its end record begins at byte {end}")
    return start, nbytes, count


def _parse_directory(data: bytes, count: int, fail: Callable[[str], NoReturn]) -> list[_Entry]:
    entries = []
    at = 0
    for number in range(count):
        if at + _ENTRY.size > len(data):
            fail(f"the zip directory ends within record {number} of {count}")
        fields = _ENTRY.unpack_from(data, at)
        magic, needed, flags, method, crc32, stored, nbytes = fields[:7]
        name_size, extra_size, comment, disk, attributes, header = fields[7:]
        at += _ENTRY.size
        raw_name, extra = data[at : at + name_size], data[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size + comment
        if magic != b"PK\x01\x02" or at > len(data):
            fail(f"record {number} of {count} in the zip directory is not one")
        if _MAX32 in (stored, nbytes, header) or disk == _MAX16:
            nbytes, stored, header, disk = _wide(extra, (nbytes, stored, header, disk), raw_name, fail)
        if disk:
            fail(f"record {raw_name!r:.200} is in another file of a split archive")
        if flags & ~_KNOWN_FLAGS or needed > _NEWEST:
            fail(f"record {raw_name!r:.200} is encrypted, or of a kind that is not known (flags {flags:#06x})")
        if nbytes and (attributes & _FOLDER or raw_name.endswith(b"/")):
            # Torch takes such a record for empty, and gives memory that nobody has written to.
            fail(f"record {raw_name!r:.200} is marked as a folder, but has {nbytes} bytes")
        if method not in (_STORED, _DEFLATED):
            fail(f"record {raw_name!r:.200} is compressed by method {method}; known are 0 (stored) and 8 (deflated)")
        if method == _STORED and stored != nbytes:
            fail(f"record {raw_name!r:.200} is not compressed, but says {stored} and {nbytes} bytes")
        if nbytes > stored * _MOST_DEFLATED:
            fail(f"record {raw_name!r:.200} cannot be {nbytes} bytes in {stored}")
        entries.append(_Entry(raw_name, flags, method, crc32, stored, nbytes, header))
    if at != len(data):
        fail(f"the zip directory has {len(data) - at} bytes after its {count} records")
    return entries


def _wide(
    extra: bytes, values: tuple[int, int, int, int], raw_name: bytes, fail: Callable[[str], NoReturn]
) -> tuple[int, int, int, int]:
    """(size, stored size, offset, disk) of an entry with those that do not fit taken from its 64-bit field."""
    at, found = 0, None
    while at + _FIELD.size <= len(extra):
        number, nbytes = _FIELD.unpack_from(extra, at)
        at += _FIELD.size
        if number == _ZIP64:
            if found is not None:
                fail(f"record {raw_name!r:.200} has two fields of 64-bit sizes")
            found = extra[at : at + nbytes]
        at += nbytes
    if found is None or at != len(extra):
        fail(f"record {raw_name!r:.200} has no whole field of 64-bit sizes, but needs one")
    wide = []
    at = 0
    for value, limit in zip(values, (_MAX32, _MAX32, _MAX32, _MAX16), strict=True):
        if value == limit:
            form = "<Q" if limit == _MAX32 else "<I"
            if at + struct.calcsize(form) > len(found):
                fail(f"record {raw_name!r:.200} has too short a field of 64-bit sizes")
            (value,) = struct.unpack_from(form, found, at)
            at += struct.calcsize(form)
        wide.append(value)
    nbytes, stored, header, disk = wide
    return nbytes, stored, header, disk


def _check_local(read: ReadAt, entry: _Entry, name: str, limit: int, fail: Callable[[str], NoReturn]) -> Record:
    """The record, if its local header says what the directory says and its data ends before byte `limit`."""
    head = _LOCAL.size + len(entry.raw_name)
    if entry.header + head > limit:
        fail(f"record '{name}' begins at byte {entry.header}, which leaves no room for it before the directory")
    data = read(entry.header, head)
    magic, needed, flags, method, crc32, stored, nbytes, name_size, extra_size = _LOCAL.unpack_from(data)
    if (
        magic != SIGNATURE
        or needed > _NEWEST
        or name_size != len(entry.raw_name)
        or data[_LOCAL.size :] != entry.raw_name
    ):
        fail(f"record '{name}': there is no header of that name at byte {entry.header}")
    start = entry.header + head + extra_size
    if start + entry.stored_nbytes > limit:
        fail(f"record '{name}' takes bytes {start} to {start + entry.stored_nbytes}, past the directory at {limit}")
    if _MAX32 in (stored, nbytes):
        extra = read(entry.header + head, extra_size)
        nbytes, stored, _, _ = _wide(extra, (nbytes, stored, 0, 0), entry.raw_name, fail)
    said, known = (crc32, stored, nbytes), (entry.crc32, entry.stored_nbytes, entry.nbytes)
    later = flags & _DESCRIPTOR and said == (0, 0, 0)
    if (flags, method) != (entry.flags, entry.method) or (said != known and not later):
        fail(f"record '{name}': its header and the zip directory contradict each other")
    return Record(name, start, entry.stored_nbytes, entry.nbytes, entry.crc32, method == _DEFLATED)
