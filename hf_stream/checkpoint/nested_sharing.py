"""Which leaves of a nested state are one tensor, or views of another, so that each byte is written once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from hf_stream.copying.geometry import contiguous_stride
from hf_stream.copying.overlap import Touch, find_conflict
from hf_stream.copying.region import Region
from hf_stream.errors import CheckpointError
from hf_stream.formats.tensor_ref import View
from hf_stream.lazy import LazyTensor
from hf_stream.lazy.sources import Leaf
from hf_stream.storage.memory import MemoryStorage

Place = tuple[str, View | None]

_NOWHERE = MemoryStorage(torch.empty(0))


class _Window(NamedTuple):
    """The bytes that a tensor shows.

    Attributes:
        where: What `start` counts in: a device, whose addresses they are, or a storage.
        start: The first byte.
        lazy: Whether it is a value, of which whoever materialises it gets a copy: not memory that somebody writes to.
    """

    where: Hashable
    start: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    lazy: bool

    @property
    def key(self) -> Hashable:
        """Equal for equal windows. As text: numbers of a file could be chosen so that all have one hash."""
        return self.where, f"{self.start} {self.dtype} {self.size} {self.stride}"

    @property
    def region(self) -> Region:
        """The same as a region, of no storage in particular."""
        return Region(_NOWHERE, self.dtype, self.size, self.stride, self.start)

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


def find_bases(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], list[Place]]:
    """The tensors to be written, by name, and for each that was given the name of one and the view of it that it is.

    As `place_tensors`; and an expanded tensor is a view of its elements in a row, each once.

    Raises:
        CheckpointError: As for `place_tensors`.
    """
    rows = [(name, *_row_of(tensor)) for name, tensor in named]
    places: list[Place] = []
    bases: dict[str, torch.Tensor] = {}
    for (name, row, own), (base, view) in zip(rows, place_tensors([(name, row) for name, row, _ in rows]), strict=True):
        if base == name:
            bases[name] = row
        if own is not None:
            view = replace(own, offset=0 if view is None else view.offset)
        places.append((base, view))
    return bases, places


def _row_of(tensor: torch.Tensor) -> tuple[torch.Tensor, View | None]:
    """The elements that the tensor has in memory, and how it shows them, if it shows some of them more than once."""
    if isinstance(tensor, LazyTensor) and not isinstance(tensor._source, Leaf):
        return tensor, None
    view = View(tuple(tensor.shape), tensor.stride(), 0)
    if tensor.numel() <= view.end:
        return tensor, None
    return tensor.detach().as_strided((view.end,), (1,), int(tensor.storage_offset())), view


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
        key: Hashable
        if window is not None:
            key = window.key
        elif isinstance(tensor, LazyTensor):
            # What `identity` holds, with the numbers as text, as in `_Window.key`.
            key = tensor._source, f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {tensor.dtype}"
        else:
            key = id(tensor)
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
        return _Window(tensor.device, tensor.data_ptr(), *shown, lazy=False)
    source = tensor._source
    if not isinstance(source, Leaf):
        return None
    offset = source.base + int(tensor.storage_offset()) * tensor.itemsize
    if isinstance(source.storage, MemoryStorage):
        return _Window(source.storage.device, source.storage.address + offset, *shown, lazy=True)
    return _Window(source.storage, offset, *shown, lazy=True)


def _views(windows: Sequence[tuple[_Window, str]]) -> dict[Hashable, Place]:
    """Those of the windows that are views of others."""
    views: dict[Hashable, Place] = {}
    base: tuple[_Window, str] | None = None
    own: list[tuple[_Window, str]] = []
    for window, name in sorted(windows, key=_widest_first):
        view = None if base is None else _view(window, base[0])
        if base is not None and view is not None:
            views[window.key] = base[1], view
            continue
        own.append((window, name))
        if window.is_row_major:
            base = window, name
    _check_apart([(window, name) for window, name in own if not window.lazy])
    return views


def _check_apart(windows: Sequence[tuple[_Window, str]]) -> None:
    """Refuse windows on memory that have a byte in common."""
    touches = [Touch(window.start, window.stop, window.region, n, True) for n, (window, _) in enumerate(windows)]
    conflict = find_conflict(touches, strict=True)
    if conflict is not None:
        one, other = (windows[n][1] for n in conflict)
        raise CheckpointError(
            f"'{one}' and '{other}' overlap in memory, and neither is a view of the other, contiguous "
            "one: they could not share it after loading. Clone one of them"
        )


def _widest_first(item: tuple[_Window, str]) -> tuple[int, int, bool]:
    """A window comes before all that lie within it."""
    window = item[0]
    return window.start, -window.stop, not window.is_row_major


def _view(window: _Window, base: _Window) -> View | None:
    step, rest = divmod(window.start - base.start, base.dtype.itemsize)
    if rest or window.dtype != base.dtype or window.stop > base.stop:
        return None
    return View(window.size, window.stride, step)
