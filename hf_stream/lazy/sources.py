"""What a LazyTensor's elements come from: real storage, tiles of other lazies, or a deferred operation.

A LazyTensor is always one strided window over one source. A `Leaf` is real bytes. `Tiles` and `Output` are virtual:
they stand for a buffer that is built piece by piece, or when its turn comes. So a view op only ever rewrites the
window, whatever lies below, and all pushing of windows through tiles happens once, in `lower.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hf_stream.copying.geometry import contiguous_stride
from hf_stream.storage.base import Storage

if TYPE_CHECKING:
    from hf_stream.lazy.tensor import LazyTensor


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
        self.offset = int(window.storage_offset())
        self.dtype = window.dtype
        self.source = source


class Tiles:
    """Parts side by side along `dim`, as the row-major buffer of `shape` and `dtype` that concatenating would build.

    Parts have at least one dim. With one part this is a copy of it: in row-major order (`clone`, `contiguous`), as
    another dtype, or both.

    Attributes:
        ends: Where each part ends along `dim`.
        steps: Strides of the buffer, in elements.
        built: The whole buffer, for windows that are too fragmented to read piece by piece; set when first needed.
    """

    __slots__ = ("built", "dim", "dtype", "ends", "parts", "shape", "steps")

    def __init__(self, parts: Sequence[Part], dim: int, dtype: torch.dtype) -> None:
        self.parts = parts
        self.dim = dim
        self.dtype = dtype
        self.ends = list(accumulate(part.size[dim] for part in parts))
        shape = list(parts[0].size)
        shape[dim] = self.ends[-1]
        self.shape = tuple(shape)
        self.steps = contiguous_stride(shape)
        self.built: Output | None = None


class Compute:
    """A deferred operation: it runs when one of its outputs is needed.

    Attributes:
        inputs: The lazies among its arguments, each once.
        results: What it gives, as meta tensors: sizes, dtypes and dense strides that its outputs keep.
        default_dtype: Torch's default when it was recorded: some ops promote to it.
    """

    __slots__ = ("args", "default_dtype", "func", "inputs", "kwargs", "results")

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[LazyTensor],
        results: Sequence[torch.Tensor] = (),
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.results = results
        self.default_dtype = torch.get_default_dtype()


@dataclass(frozen=True, slots=True)
class Output:
    """The memory of the `index`-th tensor that `compute` gives."""

    compute: Compute
    index: int


Source: TypeAlias = Leaf | Tiles | Output


class Buffer:
    """Memory without gaps that a LazyTensor shares with its views, and that may be written to while nothing runs yet.

    What is in it is a source. A write puts another in its place: an operation that goes from the memory as it was to
    the memory as it is then. Whoever builds on the elements before keeps the source of that time.

    Attributes:
        now: What is in it.
        shared: Whether somebody else builds on `now`, so that a write must leave that as it is.
    """

    __slots__ = ("device", "dtype", "now", "numel", "shared")

    def __init__(self, source: Source, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self.dtype = dtype
        self.device = device
        self.put(source)

    def put(self, source: Source, shared: bool = False) -> None:
        """From now on this is in it."""
        self.now = source
        self.shared = shared

    def taken(self) -> Source:
        """What is in it, for somebody to build on."""
        self.shared = True
        return self.now
