"""Bytes of tensors in memory, on any device."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Hashable, Sequence
from functools import cache

import torch

from hf_stream.storage.base import Storage

HUGE_PAGE_MIN_BYTES = 4 << 20

_HUGE_PAGE = 2 << 20
_WRITABLE = 0x200  # PyBUF_WRITE
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class MemoryStorage(Storage):
    """The whole storage under a tensor, which it keeps alive.

    A view and its base give equal storages. Tensors without data (meta) have none.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            raise ValueError(f"a tensor on the meta device has no bytes to copy, got shape {list(tensor.shape)}")
        self._storage = tensor.untyped_storage()
        self.device = self._storage.device
        self.addressable = self.device.type == "cpu"
        self.name = f"memory ({self.device})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryStorage) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Size in bytes as it is now: sharing or resizing a storage moves its memory."""
        return self._storage.nbytes()

    @property
    def place(self) -> Hashable:
        """Device and address."""
        return "memory", str(self.device), self.address

    @property
    def address(self) -> int:
        """Where its first byte is on the device, as it is now."""
        return self._storage.data_ptr()

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """The memory itself, for CPU tensors."""
        if not self.addressable:
            return super().bytes_at(offset, nbytes)
        if not nbytes:
            return memoryview(bytearray())
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} lie outside a storage of {self.nbytes} bytes")
        # The view does not keep the memory alive: whoever holds it must hold this storage too.
        view: memoryview = _memory_view(self._storage.data_ptr() + offset, nbytes, _WRITABLE)
        return view

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from the memory at `offset`."""
        if self.addressable:
            buffer[:] = self.bytes_at(offset, len(buffer))
        elif len(buffer):
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(self._flat(offset, len(buffer)))

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write `buffer` to the memory at `offset`."""
        if self.addressable:
            self.bytes_at(offset, len(buffer))[:] = buffer
        elif len(buffer):
            # torch takes writable buffers only.
            source = bytearray(buffer) if buffer.readonly else buffer
            self._flat(offset, len(buffer)).copy_(torch.frombuffer(source, dtype=torch.uint8))

    def window(
        self, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], writable: bool = False
    ) -> torch.Tensor | None:
        """A view of the memory, always writable."""
        del writable
        if offset % dtype.itemsize:
            return None
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        stop = offset + elements * dtype.itemsize
        if 0 not in size and stop > self.nbytes:
            # torch would make the storage larger, and show whatever is there.
            raise ValueError(f"bytes {offset} to {stop} lie outside a storage of {self.nbytes} bytes")
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self._storage, offset // dtype.itemsize, tuple(size), tuple(stride))

    def _flat(self, offset: int, nbytes: int) -> torch.Tensor:
        tensor = self.window(offset, torch.uint8, (nbytes,), (1,))
        assert tensor is not None  # bytes are always aligned
        return tensor


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def trim_heap() -> None:
    """Have the allocator give freed memory back to the system; best effort, never fails.

    The allocator of glibc takes blocks of less than 32 MiB from its heap, and keeps what lies below anything in use.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel for huge pages under a CPU tensor that is about to be filled; best effort, never fails.

    Only whole huge pages inside the tensor are advised, so no memory beyond the tensor is used. Tensors below 4 MiB
    and systems without huge pages are left alone.
    """
    if tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    storage = tensor.untyped_storage()
    if storage.nbytes() < HUGE_PAGE_MIN_BYTES:
        return
    start = -(-storage.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    stop = (storage.data_ptr() + storage.nbytes()) // _HUGE_PAGE * _HUGE_PAGE
    if start < stop:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ctypes.c_int(mmap.MADV_HUGEPAGE))
