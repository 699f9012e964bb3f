"""Which way each copy goes, cut and joined into moves of a good size."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_stream.copying.cuda import Download, Upload
from hf_stream.copying.elements import BOX_ELEMENTS
from hf_stream.copying.geometry import Dim, merge_dims, offsets, split_run, tiles
from hf_stream.copying.moves import Mosaic, Run, Runs, Tile
from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.copying.staging import CACHED_BYTES, LONG_RUN, reads_in_runs
from hf_stream.storage.base import Storage
from hf_stream.storage.file import MAX_BUFFERS
from hf_stream.storage.memory import MemoryStorage

Move = Runs | Tile | Mosaic

# Large enough that a system call or a mapping costs nothing beside its bytes, small enough to share among threads.
MOVE_BYTES = 16 << 20

# A mosaic is written from the cache it was put together in.
MOSAIC_BYTES = 1 << 20

# One system call takes many runs if they are next to each other in the file; each costs a buffer object.
_SCATTERED_RUN = 4 << 10

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def schedule(copies: Iterable[Copy], share: int) -> list[Move]:
    """Cut copies into moves, in the order of the files.

    Args:
        copies: Any copies whose regions lie in their storages.
        share: Bytes of temporary memory that one move may use.
    """
    moves: list[Move] = []
    runs: dict[Hashable, list[Run]] = {}
    gapped: dict[Hashable, list[Loops]] = {}
    for copy in copies:
        src, dst = copy.src, copy.dst
        if dst.numel == 0:
            continue
        if copy.is_raw:
            item = src.dtype.itemsize
            dims = merge_dims((*src.size, item), _byte_steps(src), _byte_steps(dst))
            outer, nbytes = split_run(dims)
            if _goes_in_runs(src, dst, single=not outer, nbytes=nbytes):
                found = runs.setdefault(_group(src.storage, dst.storage), [])
                for src_at, dst_at in offsets(outer):
                    found.extend(_split(Run(copy, src.offset + src_at, dst.offset + dst_at, nbytes)))
                continue
            loops = _raw_loops(copy, dims)
        else:
            loops = Loops(copy, src.dtype, dst.dtype, merge_dims(src.size, src.stride, dst.stride))
        aligned = dst.offset % loops.dst_dtype.itemsize == 0
        if loops.dims and aligned and not isinstance(dst.storage, MemoryStorage) and loops.row_bytes < loops.period:
            gapped.setdefault((dst.storage.place, loops.dims[0].size, loops.period), []).append(loops)
        else:
            moves.extend(_tiles(loops, share))
    for found in runs.values():
        moves.extend(_join(found))
    for group in gapped.values():
        moves.extend(_mosaics(group, share))
    moves.sort(key=lambda move: move.position)
    return moves


@dataclass(frozen=True, slots=True)
class Loops:
    """A copy that goes element by element: its loops, the widest steps in the destination first."""

    copy: Copy
    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    dims: list[Dim]

    @property
    def period(self) -> int:
        """Bytes from one step of the outermost loop to the next, in the destination."""
        return self.dims[0].dst * self.dst_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes that one step of the outermost loop writes."""
        return math.prod(dim.size for dim in self.dims[1:]) * self.dst_dtype.itemsize

    @property
    def row_span(self) -> int:
        """Bytes from the first to the last of these."""
        return (1 + sum((dim.size - 1) * dim.dst for dim in self.dims[1:])) * self.dst_dtype.itemsize


def _byte_steps(region: Region) -> tuple[int, ...]:
    return (*(step * region.dtype.itemsize for step in region.stride), 1)


def _goes_in_runs(src: Region, dst: Region, single: bool, nbytes: int) -> bool:
    """Whether system calls on runs of `nbytes` are the fast way."""
    if src.storage.device.type != "cpu" or dst.storage.device.type != "cpu":
        return False
    if src.storage.addressable and dst.storage.addressable:
        return False
    if single or nbytes >= LONG_RUN:
        return True
    file_side = src if dst.storage.addressable else dst
    one_side_is_memory = src.storage.addressable or dst.storage.addressable
    return one_side_is_memory and nbytes >= _SCATTERED_RUN and file_side.is_contiguous


def _group(src: Storage, dst: Storage) -> Hashable:
    """Runs of one group can follow each other in one move."""
    if dst.addressable:
        return src.place, None
    if src.addressable:
        return None, dst.place
    return src.place, dst.place


def _split(run: Run) -> Iterator[Run]:
    for at in range(0, run.nbytes, MOVE_BYTES):
        yield Run(run.copy, run.src + at, run.dst + at, min(MOVE_BYTES, run.nbytes - at))


def _join(runs: list[Run]) -> Iterator[Runs]:
    """Put runs that are next to each other in the file (in both files, if there are two) into one move."""
    by_src = not runs[0].copy.src.storage.addressable
    by_dst = not runs[0].copy.dst.storage.addressable
    runs.sort(key=lambda run: (run.src, run.dst) if by_src else (run.dst, run.src))
    pending: list[Run] = []
    nbytes = 0
    for run in runs:
        if pending:
            last = pending[-1]
            follows = (not by_src or run.src == last.src + last.nbytes) and (
                not by_dst or run.dst == last.dst + last.nbytes
            )
            if not follows or nbytes + run.nbytes > MOVE_BYTES or len(pending) == MAX_BUFFERS:
                yield Runs(pending)
                pending, nbytes = [], 0
        pending.append(run)
        nbytes += run.nbytes
    yield Runs(pending)


def _raw_loops(copy: Copy, dims: Sequence[Dim]) -> Loops:
    """Loops over integers, so that every bit survives, as wide as sizes, strides and offsets allow."""
    outer, run = split_run(dims)
    steps = [step for dim in outer for step in (dim.src, dim.dst)]
    width = math.gcd(8, run, copy.src.offset, copy.dst.offset, *steps)
    units = [Dim(dim.size, dim.src // width, dim.dst // width) for dim in outer]
    if run > width:
        units.append(Dim(run // width, 1, 1))
    return Loops(copy, _UNITS[width], _UNITS[width], units)


def _tile(loops: Loops, src_at: int, dst_at: int, box: Sequence[Dim]) -> Tile:
    """The box of the loops that starts `src_at` and `dst_at` elements in."""
    copy, size = loops.copy, tuple(dim.size for dim in box)
    src_start = copy.src.offset + src_at * loops.src_dtype.itemsize
    dst_start = copy.dst.offset + dst_at * loops.dst_dtype.itemsize
    return _tile_class(copy.src.storage, copy.dst.storage)(
        copy,
        Region(copy.src.storage, loops.src_dtype, size, tuple(dim.src for dim in box), src_start),
        Region(copy.dst.storage, loops.dst_dtype, size, tuple(dim.dst for dim in box), dst_start),
        copy.via,
    )


def _tile_class(src: Storage, dst: Storage) -> type[Tile]:
    if dst.device.type == "cuda" and src.device.type == "cpu":
        return Upload
    if src.device.type == "cuda" and dst.device.type == "cpu" and not dst.addressable:
        return Download
    return Tile


def _tiles(loops: Loops, share: int) -> Iterator[Tile]:
    src_width, dst_width = loops.src_dtype.itemsize, loops.dst_dtype.itemsize
    # Either side may have to be held in scratch memory, and boxes on the way (see copy_elements).
    held = src_width + dst_width
    boxes = sum(dtype.itemsize for dtype in loops.copy.via) + 2 * dst_width
    limit = share // (held + boxes)
    if limit > BOX_ELEMENTS:
        limit = min((share - BOX_ELEMENTS * boxes) // held, MOVE_BYTES // max(src_width, dst_width))
    if reads_in_runs(loops.copy.src):
        limit = min(limit, CACHED_BYTES // src_width)
    for src_at, dst_at, box in tiles(loops.dims, limit):
        yield _tile(loops, src_at, dst_at, box)


def _mosaics(group: list[Loops], share: int) -> Iterator[Mosaic | Tile]:
    """Join loops that fill the gaps of each other; those that leave gaps are cut into tiles.

    Args:
        group: Loops of one destination with the same number and distance of rows.
        share: Bytes of temporary memory for one move.
    """
    group.sort(key=lambda loops: loops.copy.dst.offset)
    period = group[0].period
    pending: list[Loops] = []
    for loops in group:
        if pending and loops.copy.dst.offset + loops.row_span > pending[0].copy.dst.offset + period:
            yield from _mosaic(pending, share)
            pending = []
        pending.append(loops)
    yield from _mosaic(pending, share)


def _mosaic(parts: list[Loops], share: int) -> Iterator[Mosaic | Tile]:
    period = parts[0].period
    rows = min(share // 16, MOSAIC_BYTES) // period
    if rows == 0 or sum(loops.row_bytes for loops in parts) != period:
        for loops in parts:
            yield from _tiles(loops, share)
        return
    count = parts[0].dims[0].size
    base = parts[0].copy.dst.offset
    for first in range(0, count, rows):
        n = min(rows, count - first)
        cut = [
            _tile(loops, first * outer.src, first * outer.dst, [Dim(n, outer.src, outer.dst), *inner])
            for loops in parts
            for outer, *inner in [loops.dims]
        ]
        yield Mosaic(cut, base + first * period, n * period)
