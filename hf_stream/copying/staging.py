"""Moving a region's bytes to and from packed memory where its storage cannot be mapped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hf_stream.copying.geometry import Dim, contiguous_stride, merge_dims, offsets, split_run
from hf_stream.copying.region import Region
from hf_stream.copying.scratch import Scratch
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage

# A first write to a mapped page of a file costs more than a system call with a run this long.
SHORT_RUN = 512

# Reading a run this long into memory costs less than mapping its pages.
LONG_RUN = 64 << 10

# Stays in the cache between reading and writing.
CACHED_BYTES = 1 << 20


def load(region: Region, scratch: Scratch) -> torch.Tensor:
    """A region's values in scratch memory. Repeated elements (stride 0) are read once."""
    once = replace(region, size=tuple(n if step else 1 for n, step in zip(region.size, region.stride, strict=True)))
    tensor = scratch.take(once.dtype, once.size)
    if run_length(once) < SHORT_RUN:
        window = _byte_window(once, writable=False)
        if window is not None:
            tensor.view(-1).view(torch.uint8).view(window.shape).copy_(window)
            return tensor.expand(region.size)
    flat = memory_of(tensor)
    for at, packed, nbytes in _runs(once):
        once.storage.read_into(flat[packed : packed + nbytes], at)
    return tensor.expand(region.size)


def store(tensor: torch.Tensor, region: Region) -> None:
    """Write a contiguous tensor to a region."""
    if run_length(region) < SHORT_RUN:
        window = _byte_window(region, writable=True)
        if window is not None:
            window.copy_(tensor.view(-1).view(torch.uint8).view(window.shape))
            return
    flat = memory_of(tensor)
    for at, packed, nbytes in _runs(region):
        region.storage.write_from(flat[packed : packed + nbytes], at)


def relay(src: Storage, src_at: int, dst: Storage, dst_at: int, nbytes: int, scratch: Scratch) -> None:
    """Copy flat bytes between two storages that are not memory: inside the kernel, else through scratch memory."""
    if isinstance(src, FileStorage) and isinstance(dst, FileStorage):
        while nbytes and (moved := src.copy_to(dst, src_at, dst_at, nbytes)):
            src_at, dst_at, nbytes = src_at + moved, dst_at + moved, nbytes - moved
    while nbytes:
        scratch.clear()
        part = memory_of(scratch.take(torch.uint8, (min(nbytes, CACHED_BYTES, max(scratch.nbytes, 1)),)))
        src.read_into(part, src_at)
        dst.write_from(part, dst_at)
        src_at, dst_at, nbytes = src_at + len(part), dst_at + len(part), nbytes - len(part)


def reads_in_runs(region: Region) -> bool:
    """Whether a region is better read into memory than mapped: every first touch of a mapped page costs a fault."""
    return not region.storage.addressable and region.storage.device.type == "cpu" and run_length(region) >= LONG_RUN


def run_length(region: Region) -> int:
    """Bytes that lie side by side in the storage and in a packed copy of the region."""
    return _split(region)[1]


def _runs(region: Region) -> Iterator[tuple[int, int, int]]:
    """(offset in the storage, offset in packed memory, bytes) of each contiguous run."""
    outer, nbytes = _split(region)
    for at, packed in offsets(outer):
        yield region.offset + at, packed, nbytes


def _split(region: Region) -> tuple[list[Dim], int]:
    item = region.dtype.itemsize
    size = (*region.size, item)
    stride = (*(step * item for step in region.stride), 1)
    return split_run(merge_dims(size, stride, contiguous_stride(size)))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes; valid while the tensor lives."""
    region = Region.of(tensor)
    return region.storage.bytes_at(region.offset, tensor.nbytes)


def _byte_window(region: Region, writable: bool) -> torch.Tensor | None:
    """The region's bytes as a tensor of size [*size, itemsize], whatever the alignment."""
    item = region.dtype.itemsize
    stride = (*(step * item for step in region.stride), 1)
    return region.storage.window(region.offset, torch.uint8, (*region.size, item), stride, writable)
