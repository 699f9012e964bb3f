"""Which way each copy goes, cut and joined into moves of a good size."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator

import torch

from hf_stream.copying.geometry import Dim, merge_dims, offsets, split_run, tiles
from hf_stream.copying.moves import Run, Runs, Tile
from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.storage.base import Storage
from hf_stream.storage.file import MAX_BUFFERS

Move = Runs | Tile

# Large enough that a system call or a mapping costs nothing beside its bytes, small enough to share among threads.
MOVE_BYTES = 16 << 20

# Shorter runs go faster through a mapping than with a system call each.
_LONG_RUN = 64 << 10
# One system call takes many runs if they are next to each other in the file; each costs a buffer object.
_SCATTERED_RUN = 4 << 10

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def schedule(copies: Iterable[Copy], share: int) -> list[Move]:
    """Cut copies into moves, in the order of the files.

    Args:
        copies: any copies whose regions lie in their storages.
        share: bytes of temporary memory that one move may use.
    """
    moves: list[Move] = []
    runs: dict[Hashable, list[Run]] = {}
    for copy in copies:
        if copy.dst.numel == 0:
            continue
        if not copy.is_raw:
            moves.extend(_cast_tiles(copy, share))
            continue
        src, dst = copy.src, copy.dst
        item = src.dtype.itemsize
        dims = merge_dims(
            (*src.size, item), (*(step * item for step in src.stride), 1), (*(step * item for step in dst.stride), 1)
        )
        outer, nbytes = split_run(dims)
        if _goes_in_runs(src, dst, single=not outer, nbytes=nbytes):
            found = runs.setdefault(_group(src.storage, dst.storage), [])
            for src_at, dst_at in offsets(outer):
                found.extend(_split(Run(copy, src.offset + src_at, dst.offset + dst_at, nbytes)))
        else:
            moves.extend(_raw_tiles(copy, dims, share))
    for group in runs.values():
        moves.extend(_join(group))
    moves.sort(key=_position)
    return moves


def _goes_in_runs(src: Region, dst: Region, single: bool, nbytes: int) -> bool:
    """Whether system calls on runs of `nbytes` are the fast way."""
    if src.storage.device.type != "cpu" or dst.storage.device.type != "cpu":
        return False
    if src.storage.addressable and dst.storage.addressable:
        return False
    if single or nbytes >= _LONG_RUN:
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


def _cast_tiles(copy: Copy, share: int) -> Iterator[Tile]:
    src, dst = copy.src, copy.dst
    per_element = sum(dtype.itemsize for dtype in (src.dtype, dst.dtype, *copy.via))
    dims = merge_dims(src.size, src.stride, dst.stride)
    for src_at, dst_at, box in tiles(dims, min(share, MOVE_BYTES) // per_element):
        size = tuple(dim.size for dim in box)
        yield Tile(
            copy,
            Region(
                src.storage, src.dtype, size, tuple(dim.src for dim in box), src.offset + src_at * src.dtype.itemsize
            ),
            Region(
                dst.storage, dst.dtype, size, tuple(dim.dst for dim in box), dst.offset + dst_at * dst.dtype.itemsize
            ),
            copy.via,
        )


def _raw_tiles(copy: Copy, dims: list[Dim], share: int) -> Iterator[Tile]:
    """Tiles of integers, so that every bit survives, as wide as sizes, strides and offsets allow.

    Args:
        copy: a copy between equal dtypes.
        dims: its loops over bytes.
        share: bytes of temporary memory for one tile.
    """
    src, dst = copy.src, copy.dst
    outer, run = split_run(dims)
    steps = [step for dim in outer for step in (dim.src, dim.dst)]
    width = math.gcd(8, run, src.offset, dst.offset, *steps)
    units = [Dim(dim.size, dim.src // width, dim.dst // width) for dim in outer]
    if run > width:
        units.append(Dim(run // width, 1, 1))
    for src_at, dst_at, box in tiles(units, min(share, MOVE_BYTES) // (2 * width)):
        size = tuple(dim.size for dim in box)
        yield Tile(
            copy,
            Region(src.storage, _UNITS[width], size, tuple(dim.src for dim in box), src.offset + src_at * width),
            Region(dst.storage, _UNITS[width], size, tuple(dim.dst for dim in box), dst.offset + dst_at * width),
            (),
        )


def _position(move: Move) -> tuple[str, int]:
    """Where the move is in its source file, or in its destination file if it comes from memory."""
    if isinstance(move, Runs):
        copy, src, dst = move.copy, move.runs[0].src, move.runs[0].dst
    else:
        copy, src, dst = move.copy, move.src.offset, move.dst.offset
    return (copy.dst.storage.name, dst) if copy.src.storage.addressable else (copy.src.storage.name, src)
