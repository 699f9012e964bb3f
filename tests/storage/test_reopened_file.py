"""Files that are open only while they are used, against the files themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hf_stream.errors import CopyError
from hf_stream.storage.file import FileStorage
from hf_stream.storage.reopened import ReopenedFile


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)))
    return file


def read(storage: FileStorage, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    storage.read_into(memoryview(buffer), start)
    return bytes(buffer)


def test_it_reads_writes_maps_and_copies_as_an_open_file_does(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(200))
    before = descriptors()
    source, target = ReopenedFile(path), ReopenedFile(other, "r+")

    assert read(source, 10, 5) == bytes(range(10, 15))
    assert source.nbytes == 200
    target.write_from(memoryview(b"abc"), 7)
    window = target.window(16, torch.uint8, (4,), (2,), writable=True)
    assert window is not None
    window.fill_(255)
    assert source.copy_to(target, 100, 100, 50) == 50
    assert source.alias(32, torch.uint8, (3,)).tolist() == [32, 33, 34]
    del window

    content = other.read_bytes()
    assert content[7:10] == b"abc"
    assert content[16:24:2] == b"\xff" * 4
    assert content[100:150] == bytes(range(100, 150))
    assert descriptors() == before
    assert source.place == FileStorage(path).place
    assert source.identity == FileStorage(path).identity


def test_a_file_that_was_replaced_is_not_read(path: Path) -> None:
    storage = ReopenedFile(path)
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    os.replace(new, path)

    with pytest.raises(CopyError, match="was replaced or changed"):
        read(storage, 0, 1)


def test_a_file_that_was_changed_is_not_read(path: Path) -> None:
    storage = ReopenedFile(path)
    status = path.stat()
    path.write_bytes(bytes(200))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    with pytest.raises(CopyError, match="was replaced or changed"):
        read(storage, 0, 1)


def test_a_file_that_went_away_is_an_error_with_advice(path: Path) -> None:
    storage = ReopenedFile(path)
    path.unlink()

    with pytest.raises(CopyError, match=r"went away .* Open the checkpoint again"):
        read(storage, 0, 1)


def test_there_is_no_descriptor_to_keep(path: Path) -> None:
    with pytest.raises(ValueError, match="not open for longer than it is used"):
        ReopenedFile(path).fileno()
