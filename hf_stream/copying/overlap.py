"""Finding bytes that a plan writes twice, or reads and writes, without listing them one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from hf_stream.copying.region import Region

# Rows looked at one by one before a cluster counts as too fragmented to decide.
_MAX_PIECES = 1 << 18


class Touch(NamedTuple):
    """A region of at least one element that something reads or writes.

    Attributes:
        start: First byte, as `region.span` says; so does `stop`.
        owner: Whatever the caller wants back.
        writes: Whether the bytes are written; two reads never conflict.
    """

    start: int
    stop: int
    region: Region
    owner: int
    writes: bool


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one region: `run` bytes at every combination of steps, the widest first.

    Attributes:
        steps: (count, bytes) of each loop; no loop of one step.
    """

    start: int
    stop: int
    steps: tuple[tuple[int, int], ...]
    run: int
    owner: int
    writes: bool

    @classmethod
    def of(cls, touch: Touch) -> Extent:
        """The loops over a region's bytes, merged."""
        start, stop, region, owner, writes = touch
        run = region.dtype.itemsize
        loops = sorted((step * run, n) for n, step in zip(region.size, region.stride, strict=True) if n > 1 and step)
        steps: list[tuple[int, int]] = []
        for step, n in loops:
            if step == run and not steps:
                run *= n
            elif steps and steps[-1][0] * steps[-1][1] == step:
                steps[-1] = (steps[-1][0] * n, steps[-1][1])
            else:
                steps.append((n, step))
        return cls(start, stop, tuple(reversed(steps)), run, owner, writes)

    @property
    def repeats(self) -> bool:
        """Whether loops run into each other, so that a byte may come twice."""
        reach = self.run
        for n, step in reversed(self.steps):
            if step < reach:
                return True
            reach += (n - 1) * step
        return False

    def rows(self) -> Iterator[Extent]:
        """One extent for every step of the widest loop."""
        (n, step), *inner = self.steps
        length = self.stop - self.start - (n - 1) * step
        for i in range(n):
            start = self.start + i * step
            yield replace(self, start=start, stop=start + length, steps=tuple(inner))


_T = TypeVar("_T", Touch, Extent)


def find_conflict(touches: Sequence[Touch], *, strict: bool = False) -> tuple[int, int] | None:
    """Owners of two touches of one storage that share a byte which at least one of them writes.

    No region that is written may repeat a byte itself. Exact for everything that slicing, joining and reordering
    tensors makes; where telling would take too long, a read and a write whose spans overlap count as a conflict, two
    writes do not, or, if `strict`, do as well.
    """
    for cluster in _clusters(touches):
        found = _conflict_within([Extent.of(touch) for touch in cluster], strict)
        if found is not None:
            return found
    return None


def _clusters(extents: Sequence[_T]) -> Iterator[list[_T]]:
    """Groups of two or more whose spans overlap, with a write among them."""
    cluster: list[_T] = []
    reach = 0
    for extent in sorted(extents, key=lambda extent: (extent.start, extent.stop)):
        if cluster and extent.start >= reach:
            if len(cluster) > 1 and any(member.writes for member in cluster):
                yield cluster
            cluster = []
        reach = max(reach, extent.stop) if cluster else extent.stop
        cluster.append(extent)
    if len(cluster) > 1 and any(member.writes for member in cluster):
        yield cluster


def _conflict_within(cluster: list[Extent], strict: bool) -> tuple[int, int] | None:
    # Each entry is a cluster still to be decided; a stack, as fragmented plans would recurse too deep.
    pending = [cluster]
    pieces = 0
    while pending:
        members = pending.pop()
        first = members[0]
        if not any(member.steps for member in members):
            found = _flat_conflict(members)
            if found is not None:
                return found
            continue
        if _same_rows(members):
            # What holds for one row holds for all.
            rows = [next(member.rows()) for member in members]
        else:
            widest = max(member.steps[0][1] for member in members if member.steps)
            pieces += sum(member.steps[0][0] for member in members if member.steps and member.steps[0][1] == widest)
            if pieces > _MAX_PIECES:
                other = next((member for member in members[1:] if strict or member.writes != first.writes), None)
                return None if other is None else (first.owner, other.owner)
            rows = []
            for member in members:
                rows.extend(member.rows() if member.steps and member.steps[0][1] == widest else [member])
        pending.extend(_clusters(rows))
    return None


def _same_rows(members: list[Extent]) -> bool:
    """Whether all share the widest loop, and one row of each lies within the same period of it."""
    first = members[0]
    if not first.steps or any(member.steps[:1] != first.steps[:1] for member in members):
        return False
    n, step = first.steps[0]
    return all(member.stop - (n - 1) * step <= first.start + step for member in members)


def _flat_conflict(members: list[Extent]) -> tuple[int, int] | None:
    """The first conflict among extents without loops, sorted by start."""
    written: Extent | None = None
    read: Extent | None = None
    for member in members:
        if written is not None and member.start < written.stop:
            return written.owner, member.owner
        if member.writes and read is not None and member.start < read.stop:
            return read.owner, member.owner
        if member.writes:
            written = member
        elif read is None or member.stop > read.stop:
            read = member
    return None
