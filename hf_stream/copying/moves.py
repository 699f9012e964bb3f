"""The ways bytes move: runs through system calls, tiles through torch, mosaics of tiles written in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hf_stream.copying.elements import copy_elements
from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.copying.scratch import Scratch
from hf_stream.copying.staging import SHORT_RUN, load, memory_of, reads_in_runs, relay, run_length, store
from hf_stream.storage.memory import MemoryStorage

# Keeps every dtype aligned in a mosaic's image, wherever it starts in the file.
_IMAGE_ALIGNMENT = 64


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

    @property
    def position(self) -> tuple[str, int]:
        """File and byte where the move starts to read, or to write if it comes from memory."""
        return _position(self.copy, self.runs[0].src, self.runs[0].dst)

    def perform(self, scratch: Scratch) -> None:
        """Move the bytes."""
        src, dst = self.copy.src.storage, self.copy.dst.storage
        if dst.addressable:
            targets = [run.copy.dst.storage.bytes_at(run.dst, run.nbytes) for run in self.runs]
            src.read_scattered(targets, self.runs[0].src)
        elif src.addressable:
            sources = [run.copy.src.storage.bytes_at(run.src, run.nbytes) for run in self.runs]
            dst.write_gathered(sources, self.runs[0].dst)
        else:
            for run in self.runs:
                relay(src, run.src, dst, run.dst, run.nbytes, scratch)


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

    @property
    def position(self) -> tuple[str, int]:
        """File and byte where the move starts to read, or to write if it comes from memory."""
        return _position(self.copy, self.src.offset, self.dst.offset)

    @property
    def is_raw(self) -> bool:
        """Whether the bytes go over as they are."""
        return not self.via and self.src.dtype == self.dst.dtype

    def perform(self, scratch: Scratch) -> None:
        """Move the elements, through `scratch` where a side is not best mapped."""
        scratch.clear()
        target = self._mapped_target()
        if target is None:
            packed = scratch.take(self.dst.dtype, self.dst.size)
            self.fill(packed, scratch)
            store(packed, self.dst)
        else:
            self.fill(target, scratch)

    def fill(self, target: torch.Tensor, scratch: Scratch) -> None:
        """Copy the source's values to `target`, wherever it is."""
        mark = scratch.mark()
        source = None if reads_in_runs(self.src) else self.src.tensor()
        if source is None:
            source = load(self.src, scratch)
        copy_elements(source, target, self.via, scratch)
        scratch.rewind(mark)

    def _mapped_target(self) -> torch.Tensor | None:
        if not isinstance(self.dst.storage, MemoryStorage) and run_length(self.dst) >= SHORT_RUN:
            return None
        return self.dst.tensor(writable=True)


@dataclass(frozen=True, slots=True)
class Mosaic:
    """Tiles that together fill `nbytes` bytes of one storage from `start` on: put together in memory, written once."""

    tiles: Sequence[Tile]
    start: int
    nbytes: int

    @property
    def copy(self) -> Copy:
        """The (first) copy these belong to."""
        return self.tiles[0].copy

    @property
    def position(self) -> tuple[str, int]:
        """File and byte where the move starts to read, or to write if it comes from memory."""
        return self.tiles[0].position

    def perform(self, scratch: Scratch) -> None:
        """Move the elements."""
        scratch.clear()
        pad = self.start % _IMAGE_ALIGNMENT
        image = scratch.take(torch.uint8, (pad + self.nbytes,))
        base = Region.of(image)
        for tile in self.tiles:
            at = base.offset + pad + tile.dst.offset - self.start
            target = replace(tile.dst, storage=base.storage, offset=at).tensor(writable=True)
            assert target is not None  # aligned as it is in the file
            tile.fill(target, scratch)
        self.copy.dst.storage.write_from(memory_of(image)[pad:], self.start)


def _position(copy: Copy, src: int, dst: int) -> tuple[str, int]:
    return (copy.dst.storage.name, dst) if copy.src.storage.addressable else (copy.src.storage.name, src)
