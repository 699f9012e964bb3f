"""Files whose descriptors are not held, against the files themselves."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from file_facts import give_times_of, open_descriptors

from hf_stream.errors import CheckpointError, CopyError
from hf_stream.storage.file import FileStorage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)))
    return file


@pytest.fixture
def few() -> Iterator[None]:
    """Room for some descriptors, but none to hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for fd in held:
        os.close(fd)


def read(storage: FileStorage, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    storage.read_into(memoryview(buffer), start)
    return bytes(buffer)


def test_it_reads_writes_maps_and_copies_as_an_open_file_does(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(200))
    before = open_descriptors()
    source, target = FileStorage(path, hold=False), FileStorage(other, "r+", hold=False)

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
    assert open_descriptors() == before
    assert source.place == FileStorage(path).place
    assert source.identity == FileStorage(path).identity


def test_a_file_that_was_replaced_is_not_read(path: Path) -> None:
    storage = FileStorage(path, hold=False)
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    os.replace(new, path)

    with pytest.raises(CopyError, match="was replaced or changed"):
        read(storage, 0, 1)


@pytest.mark.parametrize("later", [0, 1])
def test_a_file_that_was_changed_is_not_read(path: Path, later: int) -> None:
    storage = FileStorage(path, hold=False)
    status = path.stat()
    path.write_bytes(bytes(200))
    give_times_of(status, path, later)

    with pytest.raises(CopyError, match="was replaced or changed"):
        read(storage, 0, 1)


def test_a_file_that_went_away_is_an_error_with_advice(path: Path) -> None:
    storage = FileStorage(path, hold=False)
    path.unlink()

    with pytest.raises(CopyError, match=r"went away .* Open the checkpoint again"):
        read(storage, 0, 1)


def test_a_file_that_became_a_fifo_is_not_waited_for(path: Path) -> None:
    storage = FileStorage(path, hold=False)
    path.unlink()
    os.mkfifo(path)

    with pytest.raises(CheckpointError, match="is a FIFO and not a regular file"):
        read(storage, 0, 1)


def test_a_closed_file_stays_closed(path: Path) -> None:
    storage = FileStorage(path, hold=False)
    storage.close()

    with pytest.raises(CopyError, match="was closed"):
        read(storage, 0, 1)


@pytest.mark.parametrize("hold", [True, False])
def test_a_relative_path_is_that_of_the_folder_it_was_opened_in(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = FileStorage("file", hold=hold)
    monkeypatch.chdir("/")

    assert read(storage, 3, 2) == bytes([3, 4])
    assert storage.name == "file"
    assert storage.path == str(path)


@pytest.mark.usefixtures("few")
def test_none_is_held_where_the_process_has_many(path: Path, tmp_path: Path) -> None:
    before = open_descriptors()
    source, target = FileStorage(path), FileStorage.create(tmp_path / "new", 200)

    assert open_descriptors() == before
    target.write_from(memoryview(read(source, 0, 200)), 0)
    assert (tmp_path / "new").read_bytes() == path.read_bytes()


def test_a_file_that_another_thread_closes_is_open_until_it_has_been_used(path: Path) -> None:
    storage = FileStorage(path)
    with storage.descriptor() as fd:
        thread = threading.Thread(target=storage.close)
        thread.start()
        thread.join()
        assert os.pread(fd, 2, 4) == bytes([4, 5])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("hold", [True, False])
def test_a_change_that_keeps_size_and_time_is_seen(path: Path, hold: bool) -> None:
    storage = FileStorage(path, hold=hold)
    storage.check_unchanged()
    status = path.stat()
    path.write_bytes(bytes(200))
    give_times_of(status, path)

    with pytest.raises(CopyError, match=r"file' was (replaced or )?changed while it was in use"):
        storage.check_unchanged()


def test_a_file_that_is_held_may_be_deleted(path: Path) -> None:
    storage = FileStorage(path)
    path.unlink()

    storage.check_unchanged()
    assert read(storage, 1, 1) == b"\1"
