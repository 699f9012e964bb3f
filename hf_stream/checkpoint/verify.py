"""Compare two checkpoints bit for bit, a few bytes at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hf_stream.checkpoint.open import open_checkpoint
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress, progress_bar
from hf_stream.lazy import LazyTensor, materialize


@dataclass(frozen=True)
class Difference:
    """The first element in which two tensors of one name, shape and dtype differ.

    Attributes:
        index: Where it is, an integer for each dimension.
        a: The element on the first side.
        b: The element on the second side.
    """

    index: tuple[int, ...]
    a: float | int | complex | bool
    b: float | int | complex | bool


@dataclass(frozen=True)
class Differences:
    """How two checkpoints differ; false if they do not.

    Attributes:
        missing: Names that only the first has.
        extra: Names that only the second has.
        shapes: Name -> both shapes, where they differ.
        dtypes: Name -> both dtypes, where they differ.
        values: Name -> the first differing element.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    values: dict[str, Difference] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.dtypes or self.values)

    def __str__(self) -> str:
        lines = [f"'{name}' is only in the first" for name in self.missing]
        lines += [f"'{name}' is only in the second" for name in self.extra]
        lines += [f"'{name}': shape {list(a)} against {list(b)}" for name, (a, b) in self.shapes.items()]
        lines += [f"'{name}': {a} against {b}" for name, (a, b) in self.dtypes.items()]
        lines += [f"'{name}' differs first at {list(d.index)}: {d.a} against {d.b}" for name, d in self.values.items()]
        return "\n".join(lines) or "no difference"


def verify(
    a: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    b: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    *,
    layout: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> Differences:
    """Compare two checkpoints: names, shapes, dtypes, and every bit, NaNs and zeros' signs included.

    Args:
        a: What `open_checkpoint` takes, or named tensors.
        b: Likewise.
        layout: Applied to `a` before comparing.
        buffer_size: Bytes of both sides held at a time, at most; the inputs of one deferred operation come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        The differences; `if verify(a, b): ...` runs if there are any.
    """
    first: Mapping[str, torch.Tensor] = a if isinstance(a, Mapping) else open_checkpoint(a)
    second: Mapping[str, torch.Tensor] = b if isinstance(b, Mapping) else open_checkpoint(b)
    if layout is not None:
        first = layout(first)
    found = Differences(
        missing=[name for name in first if name not in second], extra=[name for name in second if name not in first]
    )
    comparable: dict[str, tuple[LazyTensor, LazyTensor]] = {}
    for name in first:
        if name not in second:
            continue
        x, y = LazyTensor.from_tensor(first[name]), LazyTensor.from_tensor(second[name])
        if x.shape != y.shape:
            found.shapes[name] = tuple(x.shape), tuple(y.shape)
        elif x.dtype != y.dtype:
            found.dtypes[name] = x.dtype, y.dtype
        else:
            comparable[name] = x, y
    total = sum(x.numel() * x.itemsize for x, _ in comparable.values())
    with progress_bar(progress, total, "Verifying") as bar:
        for name, (x, y) in comparable.items():
            difference = _first_difference(x, y, buffer_size // 2, bar)
            if difference is not None:
                found.values[name] = difference
    return found


def _first_difference(x: LazyTensor, y: LazyTensor, limit: int, bar: Progress | None) -> Difference | None:
    for corner, piece in _pieces(tuple(x.shape), max(1, limit // x.itemsize)):
        left, right = materialize([x[piece], y[piece]], device="cpu")
        if bar is not None:
            bar.update(left.numel() * left.itemsize)
        unequal = (_bytes(left) != _bytes(right)).nonzero()
        if len(unequal):
            within = int(unequal[0]) // left.itemsize
            place = torch.unravel_index(torch.tensor(within), left.shape)
            index = tuple(int(at) + start for at, start in zip(place, corner, strict=True))
            return Difference(index, _element(left, within), _element(right, within))
    return None


def _pieces(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Row-major blocks of at most `limit` elements that cover `shape`: the first index, and the slices, of each."""
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    rest = torch.Size(shape[1:]).numel()
    if rest <= limit:
        rows = limit // rest
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            yield (start, *(0 for _ in shape[1:])), (slice(start, stop), *(slice(None) for _ in shape[1:]))
        return
    for row in range(shape[0]):
        for corner, piece in _pieces(shape[1:], limit):
            yield (row, *corner), (slice(row, row + 1), *piece)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _element(tensor: torch.Tensor, index: int) -> float | int | complex | bool:
    element = tensor.reshape(-1)[index]
    if element.is_floating_point() and element.itemsize == 1:
        element = element.view(torch.uint8) if "float4" in str(element.dtype) else element.float()
    value: float | int | complex | bool = element.item()
    return value
