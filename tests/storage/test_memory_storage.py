from __future__ import annotations

import pytest
import torch

from hf_stream.storage import MemoryStorage, advise_huge_pages


def test_holds_the_whole_storage_under_a_view():
    base = torch.arange(10, dtype=torch.int16)
    storage = MemoryStorage(base[4:6])
    assert storage.nbytes == 20
    assert bytes(storage.bytes_at(2, 4)) == bytes([1, 0, 2, 0])
    assert storage == MemoryStorage(base)
    assert hash(storage) == hash(MemoryStorage(base))
    assert storage != MemoryStorage(base.clone())


def test_keeps_the_memory_alive():
    storage = MemoryStorage(torch.full((1000,), 7, dtype=torch.uint8))
    torch.full((1000,), 9, dtype=torch.uint8)
    assert bytes(storage.bytes_at(0, 1000)) == b"\7" * 1000


def test_reads_writes_and_windows():
    tensor = torch.zeros(16, dtype=torch.uint8)
    storage = MemoryStorage(tensor)
    storage.write_from(memoryview(b"abc"), 3)
    buffer = bytearray(5)
    storage.read_into(memoryview(buffer), 2)
    assert buffer == b"\0abc\0"
    window = storage.window(4, torch.int32, (2,), (2,))
    window.fill_(-1)
    assert tensor.tolist() == [0, 0, 0, 97] + [255] * 4 + [0] * 4 + [255] * 4
    assert storage.window(3, torch.int32, (1,), (1,)) is None


def test_bytes_outside_are_refused():
    storage = MemoryStorage(torch.zeros(4))
    for offset, nbytes in ((-1, 2), (10, 7)):
        with pytest.raises(ValueError, match="outside a storage of 16 bytes"):
            storage.bytes_at(offset, nbytes)


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.bool, torch.complex64])
def test_any_dtype(dtype):
    tensor = torch.arange(16, dtype=torch.uint8).view(torch.uint8 if dtype == torch.bool else dtype)
    assert bytes(MemoryStorage(tensor).bytes_at(0, 16)) == bytes(range(16))


def test_a_meta_tensor_has_no_bytes():
    with pytest.raises(ValueError, match="meta"):
        MemoryStorage(torch.empty(3, device="meta"))


@pytest.mark.parametrize("elements", [0, 10, 1 << 20, (1 << 21) + 3])
def test_advice_on_huge_pages_changes_no_value(elements):
    tensor = torch.arange(elements, dtype=torch.int32)
    advise_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(elements, dtype=torch.int32))
    advise_huge_pages(torch.empty(1 << 20, device="meta"))


def test_memory_that_has_moved_is_followed():
    tensor = torch.arange(1000, dtype=torch.int64)
    storage = MemoryStorage(tensor)
    tensor.share_memory_()
    tensor.fill_(7)
    assert bytes(storage.bytes_at(0, 8)) == bytes([7] + [0] * 7)
    assert storage == MemoryStorage(tensor)


def test_memory_that_has_gone_is_not_made_again():
    tensor = torch.arange(10)
    storage = MemoryStorage(tensor)
    tensor.untyped_storage().resize_(40)
    assert storage.nbytes == 40
    assert storage.window(0, torch.int64, (5,), (1,)).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="0 to 80 lie outside a storage of 40 bytes"):
        storage.window(0, torch.int64, (10,), (1,))
    assert storage.window(40, torch.int64, (2, 0), (1, 1)).shape == (2, 0)
