"""The two ways bytes move: flat runs through system calls, strided tiles through torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hf_stream.copying.geometry import contiguous_stride, merge_dims, offsets, split_run, tiles
from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.copying.scratch import Scratch
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage

# Below torch's grain size an op runs on the calling thread alone: our threads must not each wake torch's pool.
_SERIAL_ELEMENTS = 32767


class Run(NamedTuple):
    """Flat bytes of one copy."""

    copy: Copy
    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Flat runs between two storages; next to each other in `src` if `dst` is memory, in `dst` if `src` is."""

    runs: Sequence[Run]

    @property
    def copy(self) -> Copy:
        """The (first) copy these belong to."""
        return self.runs[0].copy

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(run.nbytes for run in self.runs)

    def perform(self, scratch: Scratch) -> None:
        """Move the bytes."""
        src, dst = self.copy.src.storage, self.copy.dst.storage
        if dst.addressable:
            buffers = [run.copy.dst.storage.bytes_at(run.dst, run.nbytes) for run in self.runs]
            src.read_scattered(buffers, self.runs[0].src)
        elif src.addressable:
            buffers = [run.copy.src.storage.bytes_at(run.src, run.nbytes) for run in self.runs]
            dst.write_gathered(buffers, self.runs[0].dst)
        else:
            for run in self.runs:
                _relay(src, run.src, dst, run.dst, run.nbytes, scratch)


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a copy that goes element by element: strides differ, or dtypes do."""

    copy: Copy
    src: Region
    dst: Region
    via: tuple[torch.dtype, ...]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.dst.nbytes

    def perform(self, scratch: Scratch) -> None:
        """Move the elements, through `scratch` where a side cannot be mapped."""
        scratch.clear()
        src = self.src.tensor()
        if src is None:
            src = _load(self.src, scratch)
        mapped = self.dst.tensor(writable=True)
        dst = scratch.take(self.dst.dtype, self.dst.size) if mapped is None else mapped
        _copy(src, dst, self.via, scratch)
        if mapped is None:
            _store(dst, self.dst)


def _copy(src: torch.Tensor, dst: torch.Tensor, via: Sequence[torch.dtype], scratch: Scratch) -> None:
    """Copy `src` to `dst` in boxes small enough for the caches."""
    dims = merge_dims(src.shape, src.stride(), dst.stride())
    src_base, dst_base = src.storage_offset(), dst.storage_offset()
    mark = scratch.mark()
    for src_at, dst_at, box in tiles(dims, _SERIAL_ELEMENTS):
        size = [dim.size for dim in box]
        value = src.as_strided(size, [dim.src for dim in box], src_base + src_at)
        for dtype in via:
            value = scratch.take(dtype, size).copy_(value)
        dst.as_strided(size, [dim.dst for dim in box], dst_base + dst_at).copy_(value)
        scratch.rewind(mark)


def _relay(src: Storage, src_at: int, dst: Storage, dst_at: int, nbytes: int, scratch: Scratch) -> None:
    """Flat bytes between two storages that are not memory."""
    if isinstance(src, FileStorage) and isinstance(dst, FileStorage):
        while nbytes and (moved := src.copy_to(dst, src_at, dst_at, nbytes)):
            src_at, dst_at, nbytes = src_at + moved, dst_at + moved, nbytes - moved
    scratch.clear()
    step = max(scratch.nbytes, 1)
    while nbytes:
        part = _bytes_of(scratch.take(torch.uint8, (min(nbytes, step),)))
        src.read_into(part, src_at)
        dst.write_from(part, dst_at)
        src_at, dst_at, nbytes = src_at + len(part), dst_at + len(part), nbytes - len(part)
        scratch.clear()


def _load(region: Region, scratch: Scratch) -> torch.Tensor:
    """A region's values as a contiguous tensor in scratch memory."""
    # Repeats (stride 0) are read once.
    once = replace(region, size=tuple(n if step else 1 for n, step in zip(region.size, region.stride, strict=True)))
    tensor = scratch.take(once.dtype, once.size)
    window = _byte_window(once, writable=False)
    if window is not None:
        tensor.view(-1).view(torch.uint8).view(window.shape).copy_(window)
    else:
        flat = _bytes_of(tensor)
        for at, packed, nbytes in _flat_runs(once):
            once.storage.read_into(flat[packed : packed + nbytes], at)
    return tensor.expand(region.size)


def _store(tensor: torch.Tensor, region: Region) -> None:
    """Write a contiguous tensor to a region."""
    window = _byte_window(region, writable=True)
    if window is not None:
        window.copy_(tensor.view(-1).view(torch.uint8).view(window.shape))
        return
    flat = _bytes_of(tensor)
    for at, packed, nbytes in _flat_runs(region):
        region.storage.write_from(flat[packed : packed + nbytes], at)


def _byte_window(region: Region, writable: bool) -> torch.Tensor | None:
    """The region's bytes as a tensor of size [*size, itemsize], whatever the alignment."""
    item = region.dtype.itemsize
    stride = (*(step * item for step in region.stride), 1)
    return region.storage.window(region.offset, torch.uint8, (*region.size, item), stride, writable)


def _flat_runs(region: Region) -> list[tuple[int, int, int]]:
    """(offset in the storage, offset in a packed buffer, bytes) of each contiguous run."""
    item = region.dtype.itemsize
    size = (*region.size, item)
    stride = (*(step * item for step in region.stride), 1)
    outer, nbytes = split_run(merge_dims(size, stride, contiguous_stride(size)))
    return [(region.offset + at, packed, nbytes) for at, packed in offsets(outer)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory; valid while the tensor lives."""
    region = Region.of(tensor)
    return region.storage.bytes_at(region.offset, tensor.nbytes)
