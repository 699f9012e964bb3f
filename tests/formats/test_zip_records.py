from __future__ import annotations

import io
import struct
import zipfile

import hypothesis
import pytest
from hypothesis import strategies as st

from hf_stream.errors import FormatError
from hf_stream.formats.zip_records import Record, read_records


class _File:
    """Bytes that note what is read of them."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.nbytes_read = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        assert offset >= 0
        assert offset + nbytes <= len(self.content)
        self.nbytes_read += nbytes
        return self.content[offset : offset + nbytes]


def _records(content: bytes) -> dict[str, Record]:
    return read_records(_File(content).read, len(content), "x.pt")


def _archive(records: dict[str, bytes], method: int = zipfile.ZIP_STORED, wide: bool = False) -> bytearray:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in records.items():
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=wide) as record:
                record.write(content)
    return bytearray(out.getvalue())


_SAMPLE = {"a/data.pkl": b"pickle", "a/data/0": b"0123456789", "a/data/1": b""}


@hypothesis.given(
    records=st.dictionaries(
        st.text("abcdefgh/._-\N{SNOWMAN}", min_size=1, max_size=8), st.binary(max_size=50), max_size=6
    ),
    method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    wide=st.booleans(),
)
@hypothesis.settings(deadline=None)
def test_records_are_where_zipfile_has_put_them(records: dict[str, bytes], method: int, wide: bool) -> None:
    records = {name.rstrip("/") or "x": content for name, content in records.items()}
    content = bytes(_archive(records, method, wide))
    found = _records(content)
    assert list(found) == list(records)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name, record in found.items():
            info = archive.getinfo(name)
            assert (record.nbytes, record.stored_nbytes, record.crc32) == (info.file_size, info.compress_size, info.CRC)
            if not record.deflated:
                assert content[record.start : record.start + record.nbytes] == records[name]


def test_archives_with_64_bit_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if a few bytes and records were more than 32 and 16 bits can say.
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 5)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    content = bytes(_archive(_SAMPLE, wide=True))
    assert content.count(b"PK\x06\x06") == content.count(b"PK\x06\x07") == 1
    found = _records(content)
    assert {name: content[r.start : r.start + r.nbytes] for name, r in found.items()} == _SAMPLE
    end = content.index(b"PK\x06\x06")
    for at in (
        4,
        16,
        20,
        24,
        32,
        40,
        48,
        56 + 4,
        56 + 8,
        56 + 16,
    ):  # each field of the 64-bit end and of its locator matters
        damaged = bytearray(content)
        damaged[end + at] ^= 1
        with pytest.raises(FormatError, match=r"x\.pt"):
            _records(bytes(damaged))


def test_a_record_beyond_4_gib() -> None:
    far, size = 5 << 30, 10
    name = b"a/data/0"
    extra = struct.pack("<2H2Q", 1, 16, size, size)
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 7, 2**32 - 1, 2**32 - 1, len(name), len(extra))
    local += name + extra
    first = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 0, 0, 3, 0) + b"a/x"
    start = far + len(local) + size
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0) + b"a/x"
    extra = struct.pack("<2H3Q", 1, 24, size, size, far)
    entry += struct.pack(
        "<4s6H3I5H2I",
        b"PK\x01\x02",
        45,
        45,
        0,
        0,
        0,
        0,
        7,
        *[2**32 - 1] * 2,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        2**32 - 1,
    )
    entry += name + extra
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, len(entry), start)
    end = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entry), 1)
    end += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2, 2, len(entry), 2**32 - 1, 0)
    pieces = {0: first, far: local, start: entry + end64 + end}

    def read(offset: int, nbytes: int) -> bytes:
        at = max(place for place in pieces if place <= offset)
        return pieces[at][offset - at :][:nbytes]

    records = read_records(read, start + len(entry + end64 + end), "x.pt")
    assert records["a/data/0"] == Record("a/data/0", far + len(local), size, size, 7, False)


def test_headers_and_directory_alone_are_read() -> None:
    records = {f"a/data/{n}": bytes(1000) for n in range(50)}
    content = bytes(_archive(records))
    file = _File(content)
    read_records(file.read, len(content), "x.pt")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        directory = len(content) - archive.start_dir
    headers = sum(30 + len(name) for name in records)
    assert file.nbytes_read <= directory + headers + 4


def _patched(magic: bytes, which: int, at: int, form: str, value: int) -> bytes:
    """The sample with one field of its `which`-th record's header or directory entry changed."""
    content, place = _archive(_SAMPLE), -1
    for _ in range(which + 1):
        place = content.index(magic, place + 1)
    struct.pack_into(form, content, place + at, value)
    return bytes(content)


def _bomb() -> bytes:
    """A compressed record of three bytes that says it is 4 GB."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data/0", b"0")
    content = bytearray(out.getvalue())
    for magic, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        struct.pack_into("<I", content, content.index(magic) + at, 4_000_000_000)
    return bytes(content)


_LOCAL, _ENTRY, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "too few"),
        (bytes(_archive(_SAMPLE)) + b"x", "does not end"),
        (b"x" + bytes(_archive(_SAMPLE)), "directory takes"),
        (bytes(_archive(_SAMPLE))[:-1], "does not end"),
        (_patched(_LOCAL, 1, 0, "<I", 0), "no header of that name"),
        (_patched(_LOCAL, 1, 8, "<H", 8), "contradict"),
        (_patched(_LOCAL, 1, 6, "<H", 1 << 11), "contradict"),
        (_patched(_LOCAL, 1, 14, "<I", 1), "contradict"),
        (_patched(_LOCAL, 1, 18, "<I", 9), "contradict"),
        (_patched(_LOCAL, 1, 22, "<I", 9), "contradict"),
        (_patched(_LOCAL, 1, 30, "<B", ord("b")), "no header of that name"),
        (_patched(_LOCAL, 1, 28, "<H", 1), "takes bytes|overlap"),
        (_patched(_LOCAL, 1, 28, "<H", 60000), "past the directory"),
        (_patched(_ENTRY, 1, 8, "<H", 1), "encrypted"),
        (_patched(_ENTRY, 1, 6, "<H", 64), "not known"),
        (_patched(_ENTRY, 1, 10, "<H", 12), "method 12"),
        (_patched(_ENTRY, 1, 20, "<I", 9), "not compressed"),
        (_bomb(), "cannot be"),
        (bytes(_archive({"a/data/0": b"1", "a/data/0xb": b"2"})).replace(b"0xb", b"0\0b"), "a byte 0"),
        (_patched(_ENTRY, 1, 34, "<H", 1), "another file"),
        (_patched(_ENTRY, 1, 38, "<I", 0x10), "marked as a folder"),
        (_patched(_ENTRY, 1, 42, "<I", 0), "no header of that name"),
        (_patched(_ENTRY, 1, 42, "<I", 10**6), "no room"),
        (_patched(_ENTRY, 1, 42, "<I", 2**32 - 1), "64-bit"),
        (_patched(_ENTRY, 1, 28, "<H", 500), "not one"),
        (_patched(_END, 0, 4, "<H", 1), "split"),
        (_patched(_END, 0, 8, "<H", 2), "split"),
        (_patched(_END, 0, 12, "<I", 1), "directory takes"),
        (_patched(_END, 0, 16, "<I", 1), "directory takes"),
        (_patched(_END, 0, 20, "<H", 1), "does not end"),
    ],
)
def test_what_contradicts_itself_is_refused(content: bytes, fact: str) -> None:
    with pytest.raises(FormatError, match=rf"x\.pt.*({fact})"):
        _records(content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("twin", ["a/data/0", "A/DATA/0"])
def test_two_records_of_one_name_are_refused(twin: str) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in ("a/data/0", twin):
            archive.writestr(name, b"0123")
    with pytest.raises(FormatError, match="there twice"):
        _records(out.getvalue())


def test_records_that_share_bytes_are_refused() -> None:
    inner = bytes(_archive({"a/data/1": b"0123"}))
    inner = inner[: inner.index(b"PK\x01\x02")]
    content = _archive({"a/data/0": inner, "a/data/1": b"0123"})
    place = content.rindex(b"PK\x01\x02")
    struct.pack_into("<I", content, place + 42, content.index(b"PK\x03\x04", 4))
    with pytest.raises(FormatError, match="overlap"):
        _records(bytes(content))


def test_bytes_between_records_and_before_the_first() -> None:
    content = bytearray(8) + _archive({"a/x": b"1"})
    start = content.index(b"PK\x01\x02")
    struct.pack_into("<I", content, start + 42, 8)
    struct.pack_into("<I", content, content.index(b"PK\x05\x06") + 16, start)
    with pytest.raises(FormatError, match="begins at byte 8, not 0"):
        _records(bytes(content))
