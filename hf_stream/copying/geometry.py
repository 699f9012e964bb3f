"""Arithmetic on sizes and strides: merging dimensions, cutting boxes. Integers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Dim(NamedTuple):
    """One loop of a copy: `size` steps of `src` and `dst` units each."""

    size: int
    src: int
    dst: int


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, in elements.

    [a, b, c] -> (b * c, c, 1); a dimension of size 0 counts as 1, as in torch.
    """
    stride = []
    step = 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def merge_dims(size: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> list[Dim]:
    """The fewest loops that visit the same pairs of places, the widest steps in `dst` first.

    Dimensions of size 1 go; neighbours become one where both sides step on from one into the other.
    """
    dims = [Dim(*dim) for dim in zip(size, src, dst, strict=True) if dim[0] != 1]
    dims.sort(key=lambda dim: (dim.dst, dim.src), reverse=True)
    merged: list[Dim] = []
    for dim in dims:
        if merged:
            outer = merged[-1]
            if outer.dst == dim.dst * dim.size and outer.src == dim.src * dim.size:
                merged[-1] = Dim(outer.size * dim.size, dim.src, dim.dst)
                continue
        merged.append(dim)
    return merged


def split_run(dims: Sequence[Dim]) -> tuple[list[Dim], int]:
    """The outer loops, and how many units lie side by side on both sides in the innermost one."""
    if dims and dims[-1].src == dims[-1].dst == 1:
        return list(dims[:-1]), dims[-1].size
    return list(dims), 1


def offsets(dims: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """Source and destination offset of every step of the loops, the last dimension running fastest."""
    if not dims:
        yield 0, 0
        return
    *outer, inner = dims
    for src, dst in offsets(outer):
        for i in range(inner.size):
            yield src + i * inner.src, dst + i * inner.dst


def cut(dims: Sequence[Dim], limit: int) -> list[int]:
    """Tile sizes, one per dimension, of at most `limit` steps in all.

    Halves the dimension that moves farthest on both sides: rows before columns where the sides agree, and square
    tiles where one side is the transpose of the other, so that either side's bytes stay in whole pages.
    """
    tile = [dim.size for dim in dims]
    while math.prod(tile) > max(limit, 1):
        # A step of 0 repeats the same bytes: only the other side moves.
        reach = [
            (n * min(dim.src or dim.dst, dim.dst or dim.src) if n > 1 else -1, dim.dst)
            for n, dim in zip(tile, dims, strict=True)
        ]
        widest = max(range(len(tile)), key=reach.__getitem__)
        tile[widest] = -(-tile[widest] // 2)
    return tile


def tiles(dims: Sequence[Dim], limit: int) -> Iterator[tuple[int, int, list[Dim]]]:
    """Cut the loops into boxes of at most `limit` steps: source offset, destination offset and loops of each."""
    shape = cut(dims, limit)
    starts = (range(0, dim.size, step) for dim, step in zip(dims, shape, strict=True))
    for corner in itertools.product(*starts):
        src = sum(at * dim.src for at, dim in zip(corner, dims, strict=True))
        dst = sum(at * dim.dst for at, dim in zip(corner, dims, strict=True))
        box = [
            Dim(min(step, dim.size - at), dim.src, dim.dst) for at, step, dim in zip(corner, shape, dims, strict=True)
        ]
        yield src, dst, box
