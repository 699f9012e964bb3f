"""One thread's bounded temporary memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

# Cache lines: parts of one buffer never share one, and every dtype is aligned.
_ALIGNMENT = 64


class Scratch:
    """A buffer of `nbytes` that is handed out piece by piece and taken back all at once.

    The memory is only allocated when a copy first needs it.
    """

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._pinned = pinned
        self._buffer: torch.Tensor | None = None
        self._used = 0

    def clear(self) -> None:
        """Take everything back: tensors from `take` must no longer be used."""
        self._used = 0

    def mark(self) -> int:
        """A point to `rewind` to."""
        return self._used

    def rewind(self, mark: int) -> None:
        """Take back what was handed out since `mark`."""
        self._used = mark

    def take(self, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
        """A contiguous CPU tensor with arbitrary content.

        Beyond `nbytes` it is a tensor of its own: only a budget too small for a single element gets there.
        """
        nbytes = math.prod(size) * dtype.itemsize
        if self._buffer is None:
            self._buffer = self._allocate()
        start, stop = self._used, self._used + nbytes
        if stop > self.nbytes:
            return torch.empty(tuple(size), dtype=dtype, device="cpu")
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._buffer[start:stop].view(dtype).view(tuple(size))

    def _allocate(self) -> torch.Tensor:
        if self._pinned:
            return torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        # A mapping goes back to the system when it is freed. The C library keeps pieces of this size for each thread.
        pages = mmap.mmap(-1, max(self.nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8)
