from __future__ import annotations

import errno
import os
import threading
import zlib
from pathlib import Path

import pytest
import torch
from file_facts import open_descriptors

from hf_stream.errors import CopyError, FormatError
from hf_stream.formats.zip_records import Record
from hf_stream.storage import FileStorage
from hf_stream.storage.inflated import InflatedFile, inflate

CONTENT = bytes(range(256)) * 20_000
_DEFLATER = zlib.compressobj(wbits=-15)
DATA = _DEFLATER.compress(CONTENT) + _DEFLATER.flush()


@pytest.fixture
def packed(tmp_path: Path) -> FileStorage:
    (tmp_path / "x.pt").write_bytes(b"before" + DATA + b"between" + DATA + b"after")
    return FileStorage(tmp_path / "x.pt")


def _record(start: int = 6, nbytes: int = len(CONTENT), crc32: int | None = None) -> Record:
    return Record(f"r{start}", start, len(DATA), nbytes, zlib.crc32(CONTENT) if crc32 is None else crc32, True)


def _inflated(source: FileStorage, *records: Record) -> InflatedFile:
    return InflatedFile(source, records or [_record(), _record(13 + len(DATA))])


def _read(file: InflatedFile) -> None:
    file.read_into(memoryview(bytearray(5)), 0)


def test_it_reads_as_a_file_does(packed: FileStorage) -> None:
    file = _inflated(packed)
    buffer = bytearray(1000)
    file.read_into(memoryview(buffer), file.start_of(1) + 300)
    assert buffer == CONTENT[300:1300]
    assert bytes(file.window(100, torch.uint8, (3, 4), (256, 1)).contiguous().numpy()) == b"".join(
        CONTENT[100 + 256 * n : 104 + 256 * n] for n in range(3)
    )
    for number in range(2):
        assert bytes(file.alias(file.start_of(number), torch.uint8, (len(CONTENT),)).numpy()) == CONTENT
    with file.descriptor() as fd:
        assert os.fstat(fd).st_nlink == 0
    assert file.place == _inflated(packed).place
    assert file.identity == _inflated(packed).identity


@pytest.mark.parametrize("way", ["read", "window", "alias", "copy"])
def test_each_way_to_read_inflates_what_it_needs(packed: FileStorage, tmp_path: Path, way: str) -> None:
    file = _inflated(packed)
    start = file.start_of(1) + 64
    if way == "copy":
        with FileStorage.create(tmp_path / "copy", 100) as target:
            if not file.copy_to(target, start, 0, 100):
                pytest.skip("these files cannot be copied inside the kernel")
            got = (tmp_path / "copy").read_bytes()
    elif way == "read":
        got = bytearray(100)
        file.read_scattered([memoryview(got)[:50], memoryview(got)[50:]], start)
    else:
        got = (
            file.window(start, torch.uint8, (100,), (1,)) if way == "window" else file.alias(start, torch.uint8, (100,))
        ).numpy()
    assert bytes(got) == CONTENT[64:164]
    assert file._there == [False, True]


def test_a_range_over_two_records_has_both(packed: FileStorage) -> None:
    file = _inflated(packed)
    buffer = bytearray(20)
    file.read_into(memoryview(buffer), file.start_of(1) - 10)
    assert buffer == CONTENT[-10:] + CONTENT[:10]


def test_records_are_inflated_once_when_first_needed(packed: FileStorage, monkeypatch) -> None:
    reads = []
    read = FileStorage.read_into
    monkeypatch.setattr(packed, "read_into", lambda *args: reads.append(args) or read(packed, *args))
    file = _inflated(packed)
    assert not reads
    threads = [threading.Thread(target=_read, args=[file]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1


def test_many_records_take_one_descriptor(packed: FileStorage) -> None:
    before = len(open_descriptors())
    file = _inflated(packed)
    file.read_into(memoryview(bytearray(file.nbytes)), 0)
    assert len(open_descriptors()) == before + 1


def test_pieces_are_small_whatever_the_ratio(tmp_path: Path) -> None:
    deflater = zlib.compressobj(wbits=-15)
    data = b"".join([deflater.compress(bytes(1 << 24)) for _ in range(4)]) + deflater.flush()
    (tmp_path / "x").write_bytes(data)
    record = Record("r", 0, len(data), 1 << 26, 0, True)
    sizes = [len(piece) for piece in inflate(FileStorage(tmp_path / "x"), record)]
    assert sum(sizes) == 1 << 26
    assert max(sizes) <= 1 << 20


def test_no_more_is_inflated_than_declared(tmp_path: Path) -> None:
    deflater = zlib.compressobj(wbits=-15)
    data = b"".join([deflater.compress(bytes(1 << 24)) for _ in range(4)]) + deflater.flush()
    (tmp_path / "x").write_bytes(data)
    pieces = inflate(FileStorage(tmp_path / "x"), Record("r", 0, len(data), 3 << 20, 0, True))
    assert sum(len(next(pieces)) for _ in range(3)) == 3 << 20
    with pytest.raises(FormatError, match="does not give"):
        next(pieces)


@pytest.mark.parametrize("difference", [-1, 1, -len(CONTENT), 10**6])
def test_another_size_than_declared_is_an_error(packed: FileStorage, difference: int) -> None:
    file = _inflated(packed, _record(nbytes=len(CONTENT) + difference))
    for _ in range(2):  # and stays one
        with pytest.raises(FormatError, match=r"x\.pt.*does not give"):
            _read(file)


def test_a_wrong_checksum_and_damaged_data_are_errors(packed: FileStorage) -> None:
    wrong = _inflated(packed, _record(crc32=1))
    with pytest.raises(FormatError, match=r"x\.pt.*CRC-32"):
        _read(wrong)
    _read(_inflated(packed, _record(crc32=0)))  # none is known
    path = Path(packed.name)
    path.write_bytes(b"before" + b"\xff" * len(DATA) + b"after")
    with pytest.raises(FormatError, match=r"x\.pt.*damaged"):
        _read(_inflated(FileStorage(path), _record()))


def test_a_full_disk_is_an_error_before_anything_is_written(packed: FileStorage, monkeypatch) -> None:
    def no_room(fd: int, offset: int, nbytes: int) -> None:
        assert nbytes == len(CONTENT)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
    with pytest.raises(OSError, match=r"x\.pt") as caught:
        _read(_inflated(packed))
    assert caught.value.errno == errno.ENOSPC


def test_closing_gives_the_space_back(packed: FileStorage) -> None:
    file = _inflated(packed)
    _read(file)
    with file.descriptor() as fd:
        pass
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    with pytest.raises(CopyError, match="was closed"):
        _read(file)
