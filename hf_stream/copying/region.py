"""A strided window on a storage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_stream.copying.geometry import contiguous_stride
from hf_stream.storage.base import Storage
from hf_stream.storage.memory import MemoryStorage


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of one dtype at regular steps in a storage.

    Attributes:
        size: Elements per dimension.
        stride: Steps per dimension in elements, none negative; 0 repeats an element.
        offset: Bytes from the start of the storage to the first element.
    """

    storage: Storage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def contiguous(cls, storage: Storage, dtype: torch.dtype, size: Sequence[int], offset: int = 0) -> Region:
        """The region of a row-major tensor that starts at byte `offset`."""
        return cls(storage, dtype, tuple(size), contiguous_stride(size), offset)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """The region that a tensor in memory shows of its storage."""
        offset = tensor.storage_offset() * tensor.dtype.itemsize
        return cls(MemoryStorage(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(offset))

    @property
    def numel(self) -> int:
        """Number of elements, repeats included."""
        return math.prod(self.size)

    @property
    def span(self) -> tuple[int, int]:
        """First byte and the byte after the last one, counted from the start of the storage."""
        if 0 in self.size:
            return self.offset, self.offset
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + (last + 1) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the storage that the region shows, each counted once (exact but for overlapping windows)."""
        steps = zip(self.size, self.stride, strict=True)
        once = math.prod(n if step or not n else 1 for n, step in steps) * self.dtype.itemsize
        start, stop = self.span
        return min(once, stop - start)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps."""
        expected = 1
        for n, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1 and step != expected:
                return self.numel == 0
            expected *= n
        return True

    @property
    def aligned(self) -> bool:
        """Whether the first element lies at a multiple of the dtype's size, as torch needs it."""
        return self.offset % self.dtype.itemsize == 0

    def tensor(self, writable: bool = False) -> torch.Tensor | None:
        """The region as a tensor right on the storage's bytes, or None if the storage cannot give one."""
        return self.storage.window(self.offset, self.dtype, self.size, self.stride, writable)
