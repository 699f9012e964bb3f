"""Which leaves of a nested state are one tensor, or views of another, so that each byte is written once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from hf_stream.copying.region import Region
from hf_stream.errors import CheckpointError
from hf_stream.formats.tensor_ref import View
from hf_stream.lazy import LazyTensor
from hf_stream.lazy.sources import Leaf
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage

# Steps of the exact search for a common byte; who needs more counts as overlapping.
_MAX_WORK = 1_000_000

Place = tuple[str, View | None]


def place_tensors(named: Sequence[tuple[str, torch.Tensor]]) -> list[Place]:
    """For each tensor the name under which it is written, and the view of it that the tensor is.

    The first of equal windows on the same memory gives the name to all. One that lies within a contiguous tensor of its
    dtype is a view of that. Lazies share as the bytes under them do; those that are no window of one storage are
    shared only if they are the same expression.

    Raises:
        CheckpointError: Two tensors overlap in memory and neither is a view of the other, or one has lost its memory.
    """
    places: dict[Hashable, Place] = {}
    of_storage: dict[Storage, list[tuple[Region, str]]] = {}
    keys: list[Hashable] = []
    for name, tensor in named:
        region = _region(tensor)
        key: Hashable = region
        if region is None:
            key = tensor.identity if isinstance(tensor, LazyTensor) else id(tensor)
        keys.append(key)
        if key not in places:
            places[key] = name, None
            if region is not None:
                if region.span[1] > region.storage.nbytes:
                    raise CheckpointError(
                        f"'{name}' of shape {list(tensor.shape)} has a storage of {region.storage.nbytes} bytes: its "
                        "memory was given back. Gather it first"
                    )
                of_storage.setdefault(region.storage, []).append((region, name))
    for regions in of_storage.values():
        if len(regions) > 1:
            places |= _views(regions)
    return [places[key] for key in keys]


def _region(tensor: torch.Tensor) -> Region | None:
    """The bytes that a tensor shows, if it is a window on one storage."""
    if tensor.numel() == 0:
        return None
    if not isinstance(tensor, LazyTensor):
        return Region.of(tensor)
    source = tensor._source
    if not isinstance(source, Leaf):
        return None
    offset = source.base + int(tensor.storage_offset()) * tensor.itemsize
    return Region(source.storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)


def _views(regions: Sequence[tuple[Region, str]]) -> dict[Hashable, Place]:
    """Those of a storage's regions that are views of others."""
    views: dict[Hashable, Place] = {}
    base: tuple[Region, str] | None = None
    reaching: list[tuple[Region, str]] = []  # own tensors that may overlap the next
    # A region comes before all that lie within it.
    for region, name in sorted(regions, key=_widest_first):
        view = None if base is None else _view(region, base[0])
        if base is not None and view is not None:
            views[region] = base[1], view
            continue
        reaching = [other for other in reaching if other[0].span[1] > region.span[0]]
        for other, other_name in reaching:
            # Lazies of a file are values; who materialises them gets memory for each.
            if not isinstance(region.storage, FileStorage) and _overlap(region, other):
                raise CheckpointError(
                    f"'{other_name}' and '{name}' overlap in memory, and neither is a view of the other, contiguous "
                    "one: they could not share it after loading. Clone one of them"
                )
        reaching.append((region, name))
        if region.is_contiguous:
            base = region, name
    return views


def _widest_first(item: tuple[Region, str]) -> tuple[int, int, bool]:
    start, stop = item[0].span
    return start, -stop, not item[0].is_contiguous


def _view(region: Region, base: Region) -> View | None:
    step, rest = divmod(region.offset - base.offset, base.dtype.itemsize)
    if rest or region.dtype != base.dtype or region.span[1] > base.span[1]:
        return None
    return View(region.size, region.stride, step)


def _overlap(a: Region, b: Region) -> bool:
    """Whether they have a byte in common."""
    start = min(a.span[0], b.span[0])
    try:
        # The stubs know two values of max_work.
        return np.shares_memory(_dummy(a, start), _dummy(b, start), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _dummy(region: Region, start: int) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """An array that lies to a common, single byte as the region to `start`; nobody reads it."""
    offset = region.offset - start
    item = region.dtype.itemsize
    flat = as_strided(_BYTE, (offset + item,), (1,))[offset:].view(f"V{item}")
    return as_strided(flat, region.size, [step * item for step in region.stride])


_BYTE = np.zeros(1, np.uint8)
