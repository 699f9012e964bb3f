from __future__ import annotations

import errno
import gc
import os
import stat
from pathlib import Path

import pytest
import torch

from hf_stream.errors import CopyError
from hf_stream.storage import FileStorage
from hf_stream.storage.file import copy_file

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    return path


def mappings_of(path: Path) -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(str(path))


def test_reads_and_writes_at_offsets(path):
    with FileStorage(path, "r+") as file:
        buffer = bytearray(10)
        file.read_into(memoryview(buffer), 5)
        assert buffer == CONTENT[5:15]
        file.write_from(memoryview(b"hello"), 7)
        file.fsync()
    assert path.read_bytes() == CONTENT[:7] + b"hello" + CONTENT[12:]


def test_one_call_takes_more_buffers_than_the_system_does(path):
    buffers = [memoryview(bytearray(1 + i % 3)) for i in range(3000)]
    with FileStorage(path) as file:
        file.read_scattered(buffers, 3)
    joined = b"".join(buffers)
    assert joined == CONTENT[3 : 3 + len(joined)]


def test_short_transfers_are_continued(path, monkeypatch):
    def at_most_seven(call):
        def limited(fd, buffers, offset):
            first = next(buffer for buffer in buffers if len(buffer))
            return call(fd, [first[:7]], offset)

        return limited

    monkeypatch.setattr(os, "preadv", at_most_seven(os.preadv))
    monkeypatch.setattr(os, "pwritev", at_most_seven(os.pwritev))
    buffers = [bytearray(20), bytearray(0), bytearray(1), bytearray(30)]
    with FileStorage(path, "r+") as file:
        file.read_scattered([memoryview(buffer) for buffer in buffers], 100)
        assert b"".join(buffers) == CONTENT[100:151]
        file.write_gathered([memoryview(b"a" * 20), memoryview(b"b" * 15)], 1)
    assert path.read_bytes()[:37] == CONTENT[:1] + b"a" * 20 + b"b" * 15 + CONTENT[36:37]


def test_a_file_cut_short_is_an_error_that_names_it(path):
    with FileStorage(path) as file:
        os.truncate(path, 100)
        with pytest.raises(CopyError, match=r"data' ends at byte 100, bytes 100 to 200 were wanted"):
            file.read_into(memoryview(bytearray(150)), 50)
        with pytest.raises(CopyError, match="data' ends before byte 164"):
            file.window(100, torch.uint8, (64,), (1,))


def test_replacing_the_path_changes_nothing(path):
    with FileStorage(path) as file:
        new = path.with_name("new")
        new.write_bytes(b"x" * len(CONTENT))
        new.replace(path)
        buffer = bytearray(4)
        file.read_into(memoryview(buffer), 0)
        assert buffer == CONTENT[:4]
        assert bytes(file.alias(0, torch.uint8, (4,)).tolist()) == CONTENT[:4]
        assert bytes(file.window(0, torch.uint8, (4,), (1,)).tolist()) == CONTENT[:4]


def test_window_is_strided_and_unmapped_with_its_tensor(path):
    with FileStorage(path) as file:
        window = file.window(8194, torch.int16, (3, 4), (10, 2))
        expected = torch.frombuffer(bytearray(CONTENT), dtype=torch.int16)[4097:].as_strided((3, 4), (10, 2))
        assert torch.equal(window, expected)
        assert mappings_of(path) == 1
        view = window[1]
        del window
        assert mappings_of(path) == 1
        del view
        assert mappings_of(path) == 0


def test_writable_window_writes_the_file_and_a_readable_one_does_not(path):
    with FileStorage(path, "r+") as file:
        file.window(4, torch.uint8, (2,), (1,)).fill_(0)
        assert path.read_bytes() == CONTENT
        file.window(4, torch.uint8, (2,), (1,), writable=True).fill_(0)
    assert path.read_bytes() == CONTENT[:4] + b"\0\0" + CONTENT[6:]


def test_unaligned_and_empty_windows(path):
    with FileStorage(path) as file:
        assert file.window(1, torch.int16, (2,), (1,)) is None
        assert file.alias(1, torch.int16, (2,)) is None
        assert file.window(len(CONTENT), torch.int16, (0, 3), (3, 1)).shape == (0, 3)
        assert file.alias(len(CONTENT), torch.int16, (0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2])
def test_alias_has_a_storage_of_its_own_and_writes_stay_private(path, dtype):
    with FileStorage(path) as file:
        first, second = (file.alias(offset, dtype, (2, 8)) for offset in (64, 128))
    nbytes = 16 * dtype.itemsize
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == nbytes
    assert bytes(first.view(torch.uint8).flatten().tolist()) == CONTENT[64 : 64 + nbytes]
    first.view(torch.uint8).zero_()
    assert bytes(second.view(torch.uint8).flatten().tolist()) == CONTENT[128 : 128 + nbytes]
    assert path.read_bytes() == CONTENT


def test_aliases_share_one_mapping_and_release_it(path):
    with FileStorage(path) as file:
        tensors = [file.alias(offset, torch.uint8, (16,)) for offset in range(0, 160, 16)]
    assert mappings_of(path) == 1
    del tensors
    assert mappings_of(path) == 0


def test_identity_tells_changes_and_place_ignores_them(path):
    with FileStorage(path) as file, FileStorage(path) as again:
        assert file.identity == again.identity
        assert file.place == again.place
        before = file.identity
        os.utime(path, ns=(0, 0))
        assert file.identity != before
        assert file.place == again.place


def test_descriptor_is_not_inherited_and_closes(path):
    file = FileStorage(path)
    with file.descriptor() as fd:
        assert not os.get_inheritable(fd)
    file.close()
    file.close()
    with pytest.raises(CopyError, match="was closed"):
        file.read_into(memoryview(bytearray(1)), 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_create_reserves_space_with_the_mode_of_the_umask(tmp_path):
    path = tmp_path / "new"
    before = os.umask(0o027)
    try:
        FileStorage.create(path, 1 << 20).close()
    finally:
        os.umask(before)
    status = path.stat()
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    assert stat.S_IMODE(status.st_mode) == 0o640


@pytest.mark.parametrize("nbytes", [0, 10])
def test_create_never_opens_what_is_there(tmp_path, nbytes):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").write_bytes(b"keep")
    for name in ("link", "file"):
        with pytest.raises(FileExistsError):
            FileStorage.create(tmp_path / name, nbytes)
    assert not (tmp_path / "target").exists()
    assert (tmp_path / "file").read_bytes() == b"keep"


def test_no_space_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        FileStorage.create(tmp_path / "new", 100)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_filesystem_without_fallocate_checks_free_space(tmp_path, monkeypatch):
    def unsupported(fd, offset, nbytes):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with FileStorage.create(tmp_path / "new", 100) as file:
        assert file.nbytes == 100
    with pytest.raises(OSError, match="No space left on device"):
        FileStorage.create(tmp_path / "huge", 1 << 60)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("tail", [0, 3], ids=["bytes-last", "hole-last"])
def test_holes_stay_holes_in_a_copy(tmp_path, tail):
    pieces = {1 << 20: b"one" * 5000, 5 << 20: b"two" * 700_000}
    with open(tmp_path / "a", "wb") as file:
        for start, data in pieces.items():
            file.seek(start)
            file.write(data)
        file.truncate(file.tell() + (tail << 20))
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    with pytest.raises(FileExistsError):
        copy_file(tmp_path / "a", tmp_path / "b")
    os.truncate(tmp_path / "a", 1 << 40)  # far more than there is room for
    copy_file(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").stat().st_size == 1 << 40
    assert (tmp_path / "c").stat().st_blocks <= (tmp_path / "a").stat().st_blocks
    for size in (0, 5):
        (tmp_path / "small").write_bytes(b"12345"[:size])
        copy_file(tmp_path / "small", tmp_path / f"copy of {size}")
        assert (tmp_path / f"copy of {size}").read_bytes() == b"12345"[:size]
