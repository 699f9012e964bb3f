"""Windows of no elements: wherever they begin, they have no bytes, and nothing is asked of the storage."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_stream.copying import Copy, Plan, Region, execute
from hf_stream.formats.zip_records import Record
from hf_stream.lazy import LazyTensor, materialize
from hf_stream.storage import FileStorage, MemoryStorage, Storage
from hf_stream.storage.inflated import InflatedFile


def _memory(tmp_path: Path, nbytes: int) -> Storage:
    return MemoryStorage(torch.zeros(nbytes, dtype=torch.uint8))


def _file(tmp_path: Path, nbytes: int) -> Storage:
    (tmp_path / "x").write_bytes(bytes(nbytes))
    return FileStorage(tmp_path / "x", "r+")


def _inflated(tmp_path: Path, nbytes: int) -> Storage:
    deflater = zlib.compressobj(wbits=-15)
    data = deflater.compress(bytes(nbytes)) + deflater.flush()
    (tmp_path / "x.zip").write_bytes(data)
    # Whoever inflates this record fails: its checksum is wrong.
    record = Record("r", 0, len(data), nbytes, crc32=1, deflated=True)
    return InflatedFile(FileStorage(tmp_path / "x.zip"), [record])


STORAGES = pytest.mark.parametrize("make", [_memory, _file, _inflated])
Make = Callable[[Path, int], Storage]


@STORAGES
@pytest.mark.parametrize("nbytes", [0, 16])
@pytest.mark.parametrize("offset", [0, 16, 48])
def test_each_way_to_the_bytes_gives_none(make: Make, tmp_path: Path, nbytes: int, offset: int) -> None:
    storage = make(tmp_path, nbytes)
    for dtype in (torch.uint8, torch.float64):
        window = storage.window(offset, dtype, (3, 0, 2), (5, 2, 1))
        assert window is not None
        assert (window.shape, window.stride(), window.dtype) == ((3, 0, 2), (5, 2, 1), dtype)
        if isinstance(storage, FileStorage):
            alias = storage.alias(offset, dtype, (3, 0))
            assert alias is not None
            assert (alias.shape, alias.dtype) == ((3, 0), dtype)
    storage.read_into(memoryview(bytearray()), offset)
    storage.read_scattered([memoryview(bytearray()), memoryview(bytearray())], offset)
    if storage.addressable:
        assert storage.bytes_at(offset, 0) == b""
    if not isinstance(storage, InflatedFile):
        storage.write_from(memoryview(b""), offset)
    assert storage.nbytes in (nbytes, 64)


@STORAGES
def test_a_copy_of_nothing_moves_nothing(make: Make, tmp_path: Path) -> None:
    storage = make(tmp_path, 0)
    source = Region(storage, torch.int32, (2, 0), (3, 1), 48)
    target = torch.ones(4)
    copy = Copy(source, Region.of(target[:0].view(2, 0)), name="x")
    Plan([copy]).check_complete([])
    execute([copy])
    assert target.tolist() == [1] * 4


# A sum of nothing is 0: results of such windows have elements.
PROGRAMS = [
    lambda x: x.diagonal(1, 0, 2).sum(1).abs(),
    lambda x: x.sum(0).diagonal(2, 0, 1).sum(0).abs(),
    lambda x: x.to(torch.int64).diagonal(3, 0, 2).any(1),
    lambda x: x.diagonal(1, 0, 2),
    lambda x: x[2:, 1:].transpose(0, 3),
    lambda x: x[3].unbind(1)[2].to(torch.int8).abs(),
    lambda x: torch.cat([x.diagonal(1, 0, 2), x.diagonal(1, 0, 2)]),
    lambda x: torch.stack([x[1], x[2]])[1, 1:].to(torch.float16),
    lambda x: x[2:, 1:].prod(3),
]


@STORAGES
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("alias", [False, True])
def test_programs_on_empty_tensors_equal_eager_torch(make: Make, tmp_path: Path, program, alias: bool) -> None:
    real = torch.zeros(4, 3, 4, 0, dtype=torch.bool)
    lazy = LazyTensor.from_storage(make(tmp_path, 0), real.dtype, real.shape, 0)
    wanted, got = program(real), materialize([program(lazy)], alias=alias)[0]
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_views_of_real_tensors_behind_their_storage(program, alias: bool) -> None:
    view = torch.zeros(5, 4, 3, 4, 0, dtype=torch.bool)[4]
    assert view.storage_offset() > view.untyped_storage().nbytes()
    wanted, got = program(view), materialize([program(LazyTensor.from_tensor(view))], alias=alias)[0]
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
