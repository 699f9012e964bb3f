"""Tiles between storages of the CPU and a CUDA device, through pinned memory.

Each thread has one pinned buffer and waits for its own stream only, so that with two threads or more one reads or
writes a file while another's bytes cross the bus.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_stream.copying.elements import copy_elements
from hf_stream.copying.moves import Tile
from hf_stream.copying.plan import Copy
from hf_stream.copying.scratch import Scratch
from hf_stream.copying.staging import memory_of, store


def devices_of(copies: Iterable[Copy]) -> list[torch.device]:
    """The CUDA devices that take part."""
    found = {region.storage.device: None for copy in copies for region in (copy.src, copy.dst)}
    return [device for device in found if device.type == "cuda"]


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all work on the devices: memory may be freed or in use by kernels of any stream of the caller."""
    for device in devices:
        torch.cuda.synchronize(device)


class Upload(Tile):
    """A tile from the CPU's side to a device: read into pinned memory, cast on the way, and sent."""

    __slots__ = ()

    def perform(self, scratch: Scratch) -> None:
        """Move the elements; `scratch` must be pinned to be fast."""
        scratch.clear()
        packed = scratch.take(self.dst.dtype, self.dst.size)
        if self.is_raw and self.src.is_contiguous and not self.src.storage.addressable:
            self.src.storage.read_into(memory_of(packed), self.src.offset)
        else:
            self.fill(packed, scratch)
        stream = torch.cuda.Stream(self.dst.storage.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            target = self.dst.tensor(writable=True)
            assert target is not None  # device memory is aligned
            target.copy_(packed, non_blocking=True)
        stream.synchronize()


class Download(Tile):
    """A tile from a device to a storage that is not memory: fetched into pinned memory, cast there, and written."""

    __slots__ = ()

    def perform(self, scratch: Scratch) -> None:
        """Move the elements; `scratch` must be pinned to be fast."""
        scratch.clear()
        arrived = scratch.take(self.src.dtype, self.src.size)
        stream = torch.cuda.Stream(self.src.storage.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            source = self.src.tensor()
            assert source is not None  # device memory is aligned
            arrived.copy_(source, non_blocking=True)
        stream.synchronize()
        if not self.is_raw:
            packed = scratch.take(self.dst.dtype, self.dst.size)
            copy_elements(arrived, packed, self.via, scratch)
            arrived = packed
        store(arrived, self.dst)
