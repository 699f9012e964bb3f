"""What a LazyTensor's elements come from: real storage, tiles of other lazies, or a deferred operation.

A LazyTensor is always one strided window over one source. A `Leaf` is real bytes. `Tiles` and `Compute` are
virtual: they stand for a row-major buffer that is never built as a whole. So a view op only ever rewrites the window,
whatever lies below, and all pushing of windows through tiles happens once, in `lower.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from hf_stream.copying.geometry import contiguous_stride
from hf_stream.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Leaf:
    """Bytes of a storage, from `base` (in bytes) on."""

    storage: Storage
    base: int


class Part:
    """One tile: a strided window (sizes and strides in elements) over a source."""

    __slots__ = ("dtype", "offset", "size", "source", "stride")

    def __init__(self, window: torch.Tensor, source: Source) -> None:
        self.size = tuple(window.size())
        self.stride = window.stride()
        self.offset = window.storage_offset()
        self.dtype = window.dtype
        self.source = source


class Tiles:
    """Parts side by side along `dim`, as the row-major buffer of `shape` and `dtype` that concatenating would build.

    Parts have at least one dim. With one part this is a copy of it: in row-major order (`clone`, `contiguous`), as another dtype, or both.
    """

    __slots__ = ("dim", "dtype", "ends", "parts", "shape", "steps")

    def __init__(self, parts: Sequence[Part], dim: int, dtype: torch.dtype) -> None:
        self.parts = parts
        self.dim = dim
        self.dtype = dtype
        self.ends = list(accumulate(part.size[dim] for part in parts))
        shape = list(parts[0].size)
        shape[dim] = self.ends[-1]
        self.shape = tuple(shape)
        self.steps = contiguous_stride(shape)


class Compute:
    """A deferred operation: runs on its own inputs when one of its outputs is needed, and frees them."""

    __slots__ = ("args", "func", "kwargs")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs


@dataclass(frozen=True, slots=True)
class Output:
    """The `index`-th tensor that `compute` gives, as a row-major buffer; None when it gives just one."""

    compute: Compute
    index: int | None


Source: TypeAlias = Leaf | Tiles | Output
