"""Which leaves of a nested state are one tensor, or views of another, so that each byte is written once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from hf_stream.copying.geometry import contiguous_stride
from hf_stream.errors import CheckpointError
from hf_stream.formats.tensor_ref import View
from hf_stream.lazy import LazyTensor
from hf_stream.lazy.sources import Leaf
from hf_stream.storage.memory import MemoryStorage

# Steps of the exact search for a common byte; who needs more counts as overlapping.
_MAX_WORK = 1_000_000

Place = tuple[str, View | None]


class _Window(NamedTuple):
    """The bytes that a tensor shows.

    Attributes:
        where: What `start` counts in: a device, whose addresses they are, or a storage.
        start: The first byte.
    """

    where: Hashable
    start: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        view = View(self.size, self.stride, 0)
        return self.start + view.end * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        """Whether the elements lie in their order and without gaps."""
        expected = contiguous_stride(self.size)
        return all(n == 1 or step == wanted for n, step, wanted in zip(self.size, self.stride, expected, strict=True))


def place_tensors(named: Sequence[tuple[str, torch.Tensor]]) -> list[Place]:
    """For each tensor the name under which it is written, and the view of it that the tensor is.

    The first of equal windows on the same memory gives the name to all. One that lies within a contiguous tensor of its
    dtype is a view of that. Lazies share as the bytes under them do; those that are no window of one storage are
    shared only if they are the same expression.

    Raises:
        CheckpointError: Two tensors overlap in memory and neither is a view of the other, or one has lost its memory.
    """
    places: dict[Hashable, Place] = {}
    groups: dict[Hashable, list[tuple[_Window, str]]] = {}
    keys: list[Hashable] = []
    for name, tensor in named:
        window = _window(name, tensor)
        key: Hashable = window
        if window is None:
            key = tensor.identity if isinstance(tensor, LazyTensor) else id(tensor)
        keys.append(key)
        if key not in places:
            places[key] = name, None
            if window is not None:
                groups.setdefault(window.where, []).append((window, name))
    for windows in groups.values():
        places |= _views(windows)
    return [places[key] for key in keys]


def _window(name: str, tensor: torch.Tensor) -> _Window | None:
    """The window on one storage that a tensor is, or None."""
    if tensor.numel() == 0:
        return None
    shown = tensor.dtype, tuple(tensor.shape), tensor.stride()
    if not isinstance(tensor, LazyTensor):
        nbytes = tensor.untyped_storage().nbytes()
        if View(shown[1], shown[2], int(tensor.storage_offset())).end * tensor.itemsize > nbytes:
            raise CheckpointError(
                f"'{name}' of shape {list(tensor.shape)} has a storage of {nbytes} bytes: its memory was given back. "
                "Gather it first"
            )
        return _Window(tensor.device, tensor.data_ptr(), *shown)
    source = tensor._source
    if not isinstance(source, Leaf):
        return None
    offset = source.base + int(tensor.storage_offset()) * tensor.itemsize
    if isinstance(source.storage, MemoryStorage):
        return _Window(source.storage.device, source.storage.address + offset, *shown)
    return _Window(source.storage, offset, *shown)


def _views(windows: Sequence[tuple[_Window, str]]) -> dict[Hashable, Place]:
    """Those of the windows that are views of others."""
    views: dict[Hashable, Place] = {}
    base: tuple[_Window, str] | None = None
    reaching: list[tuple[_Window, str]] = []  # own tensors that may overlap the next
    for window, name in sorted(windows, key=_widest_first):
        view = None if base is None else _view(window, base[0])
        if base is not None and view is not None:
            views[window] = base[1], view
            continue
        reaching = [other for other in reaching if other[0].stop > window.start]
        for other, other_name in reaching:
            # Lazies of a file are values; who materialises them gets memory for each.
            if isinstance(window.where, torch.device) and _overlap(window, other):
                raise CheckpointError(
                    f"'{other_name}' and '{name}' overlap in memory, and neither is a view of the other, contiguous "
                    "one: they could not share it after loading. Clone one of them"
                )
        reaching.append((window, name))
        if window.is_row_major:
            base = window, name
    return views


def _widest_first(item: tuple[_Window, str]) -> tuple[int, int, bool]:
    """A window comes before all that lie within it."""
    window = item[0]
    return window.start, -window.stop, not window.is_row_major


def _view(window: _Window, base: _Window) -> View | None:
    step, rest = divmod(window.start - base.start, base.dtype.itemsize)
    if rest or window.dtype != base.dtype or window.stop > base.stop:
        return None
    return View(window.size, window.stride, step)


def _overlap(a: _Window, b: _Window) -> bool:
    """Whether they have a byte in common."""
    start = min(a.start, b.start)
    try:
        # The stubs know two values of max_work.
        return np.shares_memory(_dummy(a, start), _dummy(b, start), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _dummy(window: _Window, start: int) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """An array that lies to a common, single byte as the window to `start`; nobody reads it."""
    offset = window.start - start
    item = window.dtype.itemsize
    flat = as_strided(_BYTE, (offset + item,), (1,))[offset:].view(f"V{item}")
    return as_strided(flat, window.size, [step * item for step in window.stride])


_BYTE = np.zeros(1, np.uint8)
