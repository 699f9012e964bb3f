"""Windows on tiles become copies: each box of the result with the strided window of real bytes that fills it.

A window (sizes, strides, offset) over a row-major buffer of shape S reads the element at coordinates
c_i = o_i + sum_d j_d * k_d, where (o_i) is its offset written in S, dim d moves along one axis i(d) of S, k_d elements
a step, and j_d is the index along dim d. As long as no c_i leaves its axis or the part that holds it, the window is a
window of that part. Where it would, it is cut there, and the pieces are looked at in turn. So any composition of
views, `cat`, `stack` and copies ends in boxes that read the bytes they need and no others.

It ends, as every step goes down one source, makes a box smaller, or moves a dim to an axis further out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.errors import LazyTensorError
from hf_stream.lazy.sources import Compute, Leaf, Output, Source, Tiles
from hf_stream.lazy.tensor import LazyTensor
from hf_stream.storage.base import Storage

# Cuts at the ends of an axis before it is cheaper to build the tiles once and read from there.
MAX_CUTS = 1 << 14


@dataclass(slots=True)
class Box:
    """A box of the result and the window over `source` that fills it: one size, two sets of strides (in elements)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source: Source
    dtype: torch.dtype  # of the source's elements
    dst_stride: tuple[int, ...]
    dst_offset: int
    casts: tuple[torch.dtype, ...]  # what the elements become on the way from the source to the result, in order


@dataclass(frozen=True, slots=True)
class Pending:
    """A box whose elements a deferred operation has yet to compute."""

    output: Output
    box: Box
    dst: Region
    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of the result that this box fills."""
        return math.prod(self.box.size) * self.dst.dtype.itemsize

    def copy_from(self, outputs: Sequence[torch.Tensor]) -> Copy:
        """The copy to run once the outputs of the operation are there."""
        src = Region.of(outputs[self.output.index])
        return _copy(self.box, src.storage, src.offset, self.dst, self.name)


def lower(lazy: LazyTensor, dst: Region, name: str = "") -> Iterator[Copy | Pending]:
    """The copies that fill `dst` (the same size as `lazy`) with its elements, every element exactly once.

    They read each byte that is needed once and no other, except from tiles whose rows fit the window's so badly that
    this would take more than `MAX_CUTS` cuts: from there on such tiles count as a deferred operation, built as a whole.

    Raises:
        LazyTensorError: `dst` has another size.
    """
    if tuple(lazy.shape) != dst.size:
        raise LazyTensorError(f"'{name}': cannot fill a region of size {list(dst.size)} from shape {list(lazy.shape)}")
    window = lazy._window
    offset = int(window.storage_offset())
    box = Box(dst.size, window.stride(), offset, lazy._source, window.dtype, dst.stride, 0, (dst.dtype,))
    todo = [box]
    cuts = 0
    while todo:
        box = todo.pop()
        if 0 in box.size:
            continue
        source = box.source
        if isinstance(source, Leaf):
            yield _copy(box, source.storage, source.base, dst, name)
        elif isinstance(source, Output):
            yield Pending(source, box, dst, name)
        elif cuts < MAX_CUTS or _is_whole(box, source):
            pieces, cut = _step(box, source)
            cuts += cut
            todo.extend(reversed(pieces))
        else:
            box.source = built(source)
            box.dtype = source.dtype
            todo.append(box)


def built(tiles: Tiles) -> Output:
    """The row-major buffer of tiles as a whole."""
    if tiles.built is None:
        whole = torch.empty(tiles.shape, dtype=tiles.dtype, device="meta")
        lazy = LazyTensor(whole, tiles)
        tiles.built = Output(Compute(torch.ops.aten.detach.default, (lazy,), {}, (lazy,), (whole,)), 0)
    return tiles.built


def _copy(box: Box, storage: Storage, base: int, dst: Region, name: str) -> Copy:
    src = Region(storage, box.dtype, box.size, box.stride, base + box.offset * box.dtype.itemsize)
    out = Region(dst.storage, dst.dtype, box.size, box.dst_stride, dst.offset + box.dst_offset * dst.dtype.itemsize)
    via: list[torch.dtype] = []
    for dtype in box.casts:
        if dtype != (via[-1] if via else box.dtype):
            via.append(dtype)
    if via:
        via.pop()  # the last cast is the one into the destination
    return Copy(src, out, tuple(via), name)


def _is_whole(box: Box, tiles: Tiles) -> bool:
    return box.size == tiles.shape and box.stride == tiles.steps and box.offset == 0


def _step(box: Box, tiles: Tiles) -> tuple[list[Box], bool]:
    """One step down: the same box as windows of the parts, or cut where it leaves an axis (then the second is true)."""
    if _is_whole(box, tiles):
        return _whole(box, tiles), False
    shape, steps = tiles.shape, tiles.steps
    start = [box.offset // step % size if size > 1 else 0 for size, step in zip(shape, steps, strict=True)]
    axes, moves = [], []  # i(d) and k_d; axis -1 for dims that do not move
    reach = list(start)  # the last coordinate read along each axis
    for size, stride in zip(box.size, box.stride, strict=True):
        if size == 1 or stride == 0:
            axes.append(-1)
            moves.append(0)
            continue
        axis = next(i for i, step in enumerate(steps) if shape[i] > 1 and stride % step == 0)
        axes.append(axis)
        moves.append(stride // steps[axis])
        reach[axis] += (size - 1) * moves[-1]
    for axis, size in enumerate(shape):
        if reach[axis] >= size:
            return _cut_at_axis(box, axis, size, start[axis], reach[axis], axes, moves), True
    index = bisect_right(tiles.ends, start[tiles.dim])
    if reach[tiles.dim] < tiles.ends[index]:
        return [_into_part(box, tiles, index, start, axes, moves)], False
    return _cut_at_parts(box, tiles, index, start, reach, axes, moves), False


def _whole(box: Box, tiles: Tiles) -> list[Box]:
    """The common case: all of the tiles, in their order."""
    casts = (tiles.dtype, *box.casts)
    strides, step = box.dst_stride, box.dst_stride[tiles.dim]
    return [
        Box(part.size, part.stride, part.offset, part.source, part.dtype, strides, box.dst_offset + start * step, casts)
        for part, start in zip(tiles.parts, (0, *tiles.ends), strict=False)
    ]


def _into_part(box: Box, tiles: Tiles, index: int, start: Sequence[int], axes: list[int], moves: list[int]) -> Box:
    part = tiles.parts[index]
    offset = part.offset + sum(c * stride for c, stride in zip(start, part.stride, strict=True))
    if index:
        offset -= tiles.ends[index - 1] * part.stride[tiles.dim]
    stride = tuple(move * part.stride[axis] if move else 0 for axis, move in zip(axes, moves, strict=True))
    casts = (tiles.dtype, *box.casts)
    return Box(box.size, stride, offset, part.source, part.dtype, box.dst_stride, box.dst_offset, casts)


def _cut_at_parts(
    box: Box, tiles: Tiles, index: int, start: list[int], reach: list[int], axes: list[int], moves: list[int]
) -> list[Box]:
    """Cut a box that stays on all axes at the ends of the parts, from the part `index` on."""
    axis = tiles.dim
    dim, first, last = _widest(axis, axes, moves), start[axis], reach[axis]
    move = moves[dim]
    if last != first + (box.size[dim] - 1) * move:
        # Several dims move along the axis: one at a time.
        return _cut(box, dim, tiles.ends[index], last, move)
    boxes = []
    begin = 0
    while begin < box.size[dim]:
        here = [*start[:axis], first + begin * move, *start[axis + 1 :]]
        index = bisect_right(tiles.ends, here[axis], index)
        stop = min(box.size[dim], (tiles.ends[index] - 1 - first) // move + 1)
        piece = _narrow(box, dim, begin, stop)
        boxes.append(_into_part(piece, tiles, index, here, axes, moves))
        begin = stop
    return boxes


def _cut_at_axis(box: Box, axis: int, end: int, start: int, last: int, axes: list[int], moves: list[int]) -> list[Box]:
    """Cut a box that leaves an axis of `end` elements, so that its pieces do not, or come nearer to that."""
    dim = _widest(axis, axes, moves)
    size, move = box.size[dim], moves[dim]
    low = last - (size - 1) * move  # the furthest that the other dims go while this one stands still
    if end % move == 0 and low - start < move:
        if low < move and size > end // move:
            # Whole rows of the axis, again and again: two dims, one along the row and one from row to row.
            return _split_dim(box, dim, end // move)
    elif size > (period := end // math.gcd(end, move)):
        # Rows that do not fit the axis: every `period` of them they lie the same way again.
        return _split_dim(box, dim, period)
    return _cut(box, dim, end, last, move)


def _widest(axis: int, axes: list[int], moves: list[int]) -> int:
    return max((d for d, a in enumerate(axes) if a == axis), key=lambda d: moves[d])


def _cut(box: Box, dim: int, end: int, last: int, move: int) -> list[Box]:
    """Cut along `dim`, so that the first piece stays below coordinate `end` of its axis if anything can."""
    size = box.size[dim]
    low = last - (size - 1) * move
    # Where other dims leave even while this one stands still, its first index alone: so that they are cut.
    fits = (end - 1 - low) // move + 1 if low < end else 1
    return [_narrow(box, dim, 0, fits), _narrow(box, dim, fits, size)]


def _narrow(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box(
        (*box.size[:dim], stop - start, *box.size[dim + 1 :]),
        box.stride,
        box.offset + start * box.stride[dim],
        box.source,
        box.dtype,
        box.dst_stride,
        box.dst_offset + start * box.dst_stride[dim],
        box.casts,
    )


def _split_dim(box: Box, dim: int, row: int) -> list[Box]:
    """One dim of n * row + rest elements as two dims, n and row, and the rest apart."""
    size = box.size[dim]
    whole = size // row * row

    def twice(stride: tuple[int, ...]) -> tuple[int, ...]:
        return (*stride[:dim], stride[dim] * row, stride[dim], *stride[dim + 1 :])

    rows = Box(
        (*box.size[:dim], size // row, row, *box.size[dim + 1 :]),
        twice(box.stride),
        box.offset,
        box.source,
        box.dtype,
        twice(box.dst_stride),
        box.dst_offset,
        box.casts,
    )
    return [rows] if whole == size else [rows, _narrow(box, dim, whole, size)]
