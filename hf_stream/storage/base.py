"""What every place that holds bytes can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch


class Storage(ABC):
    """A flat run of bytes that copies read from and write to.

    Subclasses give `read_into` and `write_from`; the rest has defaults that only use these two.

    Attributes:
        name: What errors and plans call this storage (a file's path).
        nbytes: Size in bytes.
        device: Where `window` puts its tensors.
        addressable: Whether `bytes_at` gives the storage's own memory.
    """

    name: str
    nbytes: int
    device: torch.device = torch.device("cpu")
    addressable: bool = False

    @property
    def place(self) -> Hashable:
        """Equal for two storages if and only if they hold the same bytes."""
        return id(self)

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (flat, writable bytes) with the bytes that start at `offset`.

        Raises:
            CopyError: the storage ends before the buffer is full.
        """

    @abstractmethod
    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` (flat bytes) at `offset`."""

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill `buffers` one after the other with the bytes that start at `offset`."""
        for buffer in buffers:
            self.read_into(buffer, offset)
            offset += len(buffer)

    def write_gathered(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write `buffers` one after the other from `offset` on."""
        for buffer in buffers:
            self.write_from(buffer, offset)
            offset += len(buffer)

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """The storage's own memory as flat writable bytes; valid while the storage lives."""
        raise NotImplementedError(f"{self.name} cannot be addressed by the CPU")

    def window(
        self, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], writable: bool = False
    ) -> torch.Tensor | None:
        """A strided tensor right on the storage's bytes, or None if there can be none (remote, or `offset` unaligned).

        One of no elements has no bytes, and may lie anywhere: views of empty tensors begin behind their storage.

        Args:
            offset: Bytes from the start of the storage.
            dtype: Of the tensor.
            size: Of the tensor.
            stride: In elements of `dtype`.
            writable: Whether writes to the tensor must reach the storage; without it they must not be made.
        """
        del offset, dtype, size, stride, writable
        return None
