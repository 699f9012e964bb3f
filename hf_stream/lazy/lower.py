"""Windows on tiles become copies: each box of the result with the strided window of real bytes that fills it.

A window (sizes, strides, offset) over a row-major buffer of shape S reads the element at coordinates
c_i = o_i + sum_d j_d * k_d, where (o_i) is its offset written in S, dim d moves along one axis i(d) of S, k_d elements a
step, and j_d is the index along dim d. As long as no c_i leaves its axis or the part that holds it, the window is a
window of that part. Where it would, it is cut there, and the pieces are looked at in turn. So any composition of views,
`cat`, `stack` and copies ends in boxes that read the bytes they need and no others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.errors import LazyTensorError
from hf_stream.lazy.sources import Leaf, Output, Source, Tiles
from hf_stream.lazy.tensor import LazyTensor


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

    def copy_from(self, computed: torch.Tensor) -> Copy:
        """The copy to run once the contiguous result of the operation is there."""
        src = Region.of(computed)
        return _copy(self.box, src.storage, src.offset, self.dst, self.name)


def lower(lazy: LazyTensor, dst: Region, name: str = "") -> Iterator[Copy | Pending]:
    """The copies that fill `dst` (the same size as `lazy`) with its elements, every element exactly once."""
    if tuple(lazy.shape) != dst.size:
        raise LazyTensorError(f"'{name}': cannot fill a region of size {list(dst.size)} from shape {list(lazy.shape)}")
    window = lazy._window
    todo = [
        Box(
            tuple(window.size()),
            window.stride(),
            window.storage_offset(),
            lazy._source,
            window.dtype,
            dst.stride,
            0,
            (dst.dtype,),
        )
    ]
    while todo:
        box = todo.pop()
        if 0 in box.size:
            continue
        if isinstance(box.source, Tiles):
            todo.extend(reversed(_step(box, box.source)))
        elif isinstance(box.source, Leaf):
            yield _copy(box, box.source.storage, box.source.base, dst, name)
        else:
            yield Pending(box.source, box, dst, name)


def _copy(box: Box, storage: object, base: int, dst: Region, name: str) -> Copy:
    src = Region(storage, box.dtype, box.size, box.stride, base + box.offset * box.dtype.itemsize)  # type: ignore[arg-type]
    out = Region(dst.storage, dst.dtype, box.size, box.dst_stride, dst.offset + box.dst_offset * dst.dtype.itemsize)
    via: list[torch.dtype] = []
    for dtype in box.casts:
        if dtype != (via[-1] if via else box.dtype):
            via.append(dtype)
    if via:
        via.pop()  # the last cast is the one into the destination
    return Copy(src, out, tuple(via), name)


def _step(box: Box, tiles: Tiles) -> list[Box]:
    """One step down: the same box as a window of one part, or several boxes cut where it leaves an axis or a part."""
    shape, steps = tiles.shape, tiles.steps
    if box.size == shape and box.stride == steps and box.offset == 0:
        return _whole(box, tiles)
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
            return _cut(box, axis, size, start[axis], reach[axis], axes, moves, wraps=True)
    part = bisect_right(tiles.ends, start[tiles.dim])
    if reach[tiles.dim] >= tiles.ends[part]:
        end = tiles.ends[part]
        return _cut(box, tiles.dim, end, start[tiles.dim], reach[tiles.dim], axes, moves, wraps=False)
    return [_into_part(box, tiles, part, start, axes, moves)]


def _whole(box: Box, tiles: Tiles) -> list[Box]:
    """The common case: all of the tiles, in their order."""
    casts = (tiles.dtype, *box.casts)
    step = box.dst_stride[tiles.dim]
    starts = (0, *tiles.ends)
    return [
        Box(
            part.size,
            part.stride,
            part.offset,
            part.source,
            part.dtype,
            box.dst_stride,
            box.dst_offset + start * step,
            casts,
        )
        for part, start in zip(tiles.parts, starts, strict=False)
    ]


def _into_part(box: Box, tiles: Tiles, index: int, start: list[int], axes: list[int], moves: list[int]) -> Box:
    part = tiles.parts[index]
    start[tiles.dim] -= tiles.ends[index - 1] if index else 0
    offset = part.offset + sum(c * stride for c, stride in zip(start, part.stride, strict=True))
    return replace(
        box,
        stride=tuple(move * part.stride[axis] if move else 0 for axis, move in zip(axes, moves, strict=True)),
        offset=offset,
        source=part.source,
        dtype=part.dtype,
        casts=(tiles.dtype, *box.casts),
    )


def _cut(
    box: Box, axis: int, end: int, start: int, last: int, axes: list[int], moves: list[int], *, wraps: bool
) -> list[Box]:
    """Cut `box` so that its pieces stay below coordinate `end` of `axis`, or come nearer to doing so."""
    dim = max((d for d, a in enumerate(axes) if a == axis), key=lambda d: moves[d])
    size, move = box.size[dim], moves[dim]
    low = start + last - start - (size - 1) * move  # the furthest that the other dims go while this one stands still
    if wraps and end % move == 0 and low < move and size > end // move:
        # Whole rows of the axis, again and again: two dims, one along the row and one from row to row.
        row = end // move
        whole = size // row * row
        boxes = [_split_dim(_narrow(box, dim, 0, whole), dim, row)]
        return boxes if whole == size else [*boxes, _narrow(box, dim, whole, size)]
    fits = (end - 1 - low) // move + 1 if low < end else 0
    if fits:
        return [_narrow(box, dim, 0, fits), _narrow(box, dim, fits, size)]
    # Other dims leave the axis even while this one stands still: take its first index alone, so that they are cut.
    return [_narrow(box, dim, 0, 1), _narrow(box, dim, 1, size)]


def _narrow(box: Box, dim: int, start: int, stop: int) -> Box:
    return replace(
        box,
        size=(*box.size[:dim], stop - start, *box.size[dim + 1 :]),
        offset=box.offset + start * box.stride[dim],
        dst_offset=box.dst_offset + start * box.dst_stride[dim],
    )


def _split_dim(box: Box, dim: int, row: int) -> Box:
    """One dim of n * row elements as two dims, n and row."""

    def strides(stride: tuple[int, ...]) -> tuple[int, ...]:
        return (*stride[:dim], stride[dim] * row, stride[dim], *stride[dim + 1 :])

    size = (*box.size[:dim], box.size[dim] // row, row, *box.size[dim + 1 :])
    return replace(box, size=size, stride=strides(box.stride), dst_stride=strides(box.dst_stride))
