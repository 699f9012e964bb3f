"""Which parts of a tensor have been written."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

from hf_stream.errors import CheckpointError

Span = tuple[int, int]
Box = tuple[Span, ...]
Index = int | slice | EllipsisType


class Coverage:
    """What is still missing of a tensor, as boxes that do not overlap."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._missing: list[Box] = [] if 0 in shape else [tuple((0, size) for size in shape)]

    def add(self, box: Box) -> None:
        """Take note that the box has been written."""
        self._missing = [rest for old in self._missing for rest in _without(old, box)]

    def lose(self, box: Box) -> None:
        """Take note that the box may hold anything now."""
        self.add(box)
        if all(start < stop for start, stop in box):
            self._missing.append(box)

    @property
    def gap(self) -> Box | None:
        """A box that has not been written, or None if there is none."""
        return self._missing[0] if self._missing else None


def box_of(name: str, shape: Sequence[int], index: tuple[Index, ...]) -> Box:
    """The box of a tensor of `shape` that a basic index means.

    Raises:
        CheckpointError: The index does not fit, or means no box.
    """
    dots = [place for place, at in enumerate(index) if at is ...]
    before = index[: dots[0]] if dots else index
    after = index[dots[0] + 1 :] if dots else ()
    if len(before) + len(after) > len(shape):
        raise CheckpointError(f"'{name}': {len(before) + len(after)} indices for shape {list(shape)}; pass fewer")
    full = (*before, *[slice(None)] * (len(shape) - len(before) - len(after)), *after)
    return tuple(_span(name, size, at) for size, at in zip(shape, full, strict=True))


def _span(name: str, size: int, at: object) -> Span:
    if isinstance(at, slice):
        start, stop, step = at.indices(size)
        if step != 1:
            raise CheckpointError(f"'{name}': slices need step 1, got {step}; write the rows one by one")
        return start, max(start, stop)
    if isinstance(at, int) and not isinstance(at, bool) and -size <= at < size:
        return at % size, at % size + 1
    raise CheckpointError(f"'{name}': index {at!r} does not fit a dimension of {size}; pass an integer or a slice")


def _without(old: Box, cut: Box) -> list[Box]:
    """`old` less `cut`, as boxes: at most two for each dimension."""
    overlap = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(old, cut, strict=True))
    if any(start >= stop for start, stop in overlap):
        return [old]
    rest = []
    for dim, ((a, b), (c, d)) in enumerate(zip(old, overlap, strict=True)):
        for span in ((a, c), (d, b)):
            if span[0] < span[1]:
                rest.append((*overlap[:dim], span, *old[dim + 1 :]))
    return rest
