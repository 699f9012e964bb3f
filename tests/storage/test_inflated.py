from __future__ import annotations

import errno
import os
import threading
import zlib
from pathlib import Path

import pytest
import torch

from hf_stream.errors import FormatError
from hf_stream.storage import FileStorage
from hf_stream.storage.inflated import InflatedFile, inflate

CONTENT = bytes(range(256)) * 20_000


@pytest.fixture
def packed(tmp_path: Path) -> tuple[FileStorage, int]:
    deflater = zlib.compressobj(wbits=-15)
    data = deflater.compress(CONTENT) + deflater.flush()
    (tmp_path / "x.pt").write_bytes(b"before" + data + b"after")
    return FileStorage(tmp_path / "x.pt"), len(data)


def _inflated(packed: tuple[FileStorage, int], nbytes: int = len(CONTENT), crc32: int | None = None) -> InflatedFile:
    source, stored = packed
    return InflatedFile(
        source, 6, stored, nbytes, zlib.crc32(CONTENT) if crc32 is None else crc32, "'x.pt': record 'r'"
    )


def test_it_reads_as_a_file_does(packed: tuple[FileStorage, int]) -> None:
    file = _inflated(packed)
    buffer = bytearray(1000)
    file.read_into(memoryview(buffer), 300)
    assert buffer == CONTENT[300:1300]
    assert bytes(file.window(100, torch.uint8, (3, 4), (256, 1)).contiguous().numpy()) == b"".join(
        CONTENT[100 + 256 * n : 104 + 256 * n] for n in range(3)
    )
    assert bytes(file.alias(0, torch.uint8, (len(CONTENT),)).numpy()) == CONTENT
    assert os.fstat(file.fileno()).st_nlink == 0
    assert file.place == _inflated(packed).place
    assert file.identity == _inflated(packed).identity


def test_it_is_inflated_once_when_first_needed(packed: tuple[FileStorage, int], monkeypatch) -> None:
    reads = []
    read = FileStorage.read_into
    monkeypatch.setattr(FileStorage, "read_into", lambda *args: reads.append(args[0].name) or read(*args))
    file = _inflated(packed)
    assert not reads
    threads = [threading.Thread(target=file.fileno) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1


def test_pieces_are_small_whatever_the_ratio(tmp_path: Path) -> None:
    deflater = zlib.compressobj(wbits=-15)
    data = b"".join([deflater.compress(bytes(1 << 24)) for _ in range(4)]) + deflater.flush()
    (tmp_path / "x").write_bytes(data)
    sizes = [len(piece) for piece in inflate(FileStorage(tmp_path / "x"), 0, len(data), 1 << 26, "x")]
    assert sum(sizes) == 1 << 26
    assert max(sizes) <= 1 << 20


@pytest.mark.parametrize("difference", [-1, 1, -len(CONTENT), 10**6])
def test_another_size_than_declared_is_an_error(packed: tuple[FileStorage, int], difference: int) -> None:
    with pytest.raises(FormatError, match=r"x\.pt.*does not give"):
        _inflated(packed, len(CONTENT) + difference).fileno()


def test_a_wrong_checksum_and_damaged_data_are_errors(packed: tuple[FileStorage, int]) -> None:
    with pytest.raises(FormatError, match=r"x\.pt.*CRC-32"):
        _inflated(packed, crc32=1).fileno()
    _inflated(packed, crc32=0).fileno()  # none is known
    path = Path(packed[0].name)
    path.write_bytes(b"before" + b"\xff" * packed[1] + b"after")
    with pytest.raises(FormatError, match=r"x\.pt.*damaged"):
        _inflated((FileStorage(path), packed[1])).fileno()


def test_a_full_disk_is_an_error_before_anything_is_written(packed: tuple[FileStorage, int], monkeypatch) -> None:
    def no_room(fd: int, offset: int, nbytes: int) -> None:
        assert nbytes == len(CONTENT)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"x\.pt") as caught:
        _inflated(packed).fileno()
    assert caught.value.errno == errno.ENOSPC
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_gives_the_space_back(packed: tuple[FileStorage, int]) -> None:
    file = _inflated(packed)
    fd = file.fileno()
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"):
        file.fileno()
