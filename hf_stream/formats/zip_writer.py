"""The bytes of a zip archive around its records, as torch lays one out: nothing compressed, every record aligned."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

CRC_AT: Final = 14
"""Where in the header of a record its CRC-32 stands, as four little-endian bytes."""

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_ENTRY: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64: Final = struct.Struct("<4sIQI")
_FIELD: Final = struct.Struct("<2H")

_MAX16: Final = 0xFFFF
_MAX32: Final = 0xFFFFFFFF
_VERSION: Final = 20
_VERSION64: Final = 45
_ZIP64: Final = 1  # the number of the extra field with 64-bit sizes
_PADDING: Final = 0x4246  # that of the field in which torch puts its padding
_UTF8: Final = 1 << 11
_EPOCH: Final = 1 << 5 | 1  # 1980-01-01: equal contents make equal files
_ALIGNMENT: Final = 64


class NewRecord(NamedTuple):
    """One record to be.

    Attributes:
        name: With its folders, in UTF-8.
        header: Where its header begins, in bytes from the start of the file.
        nbytes: Size of its content.
        crc32: Of the content.
    """

    name: bytes
    header: int
    nbytes: int
    crc32: int


def header_of(record: NewRecord) -> bytes:
    """What stands before the content, so padded that the content is aligned."""
    wide = _sizes64(record.nbytes, record.nbytes) if record.nbytes >= _MAX32 else b""
    size = min(record.nbytes, _MAX32)
    padding = -(record.header + _LOCAL.size + len(record.name) + len(wide) + _FIELD.size) % _ALIGNMENT
    extra = wide + _FIELD.pack(_PADDING, padding) + bytes(padding)
    version = _VERSION64 if wide else _VERSION
    fields = (version, _UTF8, 0, 0, _EPOCH, record.crc32, size, size, len(record.name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *fields) + record.name + extra


def directory_of(records: Sequence[NewRecord], start: int) -> bytes:
    """The end of the file, from byte `start` on: what records there are."""
    entries = b"".join(map(_entry, records))
    count, stop = len(records), start + len(entries)
    end64 = b""
    if count >= _MAX16 or max(start, len(entries)) >= _MAX32:
        end64 = _END64.pack(
            b"PK\x06\x06", _END64.size - 12, _VERSION64, _VERSION64, 0, 0, count, count, len(entries), start
        ) + _LOCATOR64.pack(b"PK\x06\x07", 0, stop, 1)
    few = min(count, _MAX16)
    return entries + end64 + _END.pack(b"PK\x05\x06", 0, 0, few, few, min(len(entries), _MAX32), min(start, _MAX32), 0)


def _entry(record: NewRecord) -> bytes:
    # The field holds those numbers alone that do not fit.
    sizes = (record.nbytes, record.nbytes) if record.nbytes >= _MAX32 else ()
    places = (record.header,) if record.header >= _MAX32 else ()
    wide = _sizes64(*sizes, *places) if sizes or places else b""
    version = _VERSION64 if wide else _VERSION
    size = min(record.nbytes, _MAX32)
    head = (version, version, _UTF8, 0, 0, _EPOCH, record.crc32, size, size, len(record.name), len(wide))
    return _ENTRY.pack(b"PK\x01\x02", *head, 0, 0, 0, 0, min(record.header, _MAX32)) + record.name + wide


def _sizes64(*numbers: int) -> bytes:
    return _FIELD.pack(_ZIP64, 8 * len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)
