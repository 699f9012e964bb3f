"""Copies, and lists of them that can be read and checked before a byte moves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_stream.copying.overlap import Extent, Touch, find_conflict
from hf_stream.copying.region import Region
from hf_stream.errors import CopyError


@dataclass(frozen=True, slots=True)
class Copy:
    """One region's values into another of the same size.

    Attributes:
        via: Dtypes the values pass through on the way from `src.dtype` to `dst.dtype`.
        name: The tensor this is part of, for errors.
    """

    src: Region
    dst: Region
    via: tuple[torch.dtype, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if self.src.size != self.dst.size:
            raise ValueError(
                f"'{self.name}': a copy needs regions of one size, got {list(self.src.size)} from "
                f"{self.src.storage.name} and {list(self.dst.size)} in {self.dst.storage.name}."
            )

    @property
    def is_raw(self) -> bool:
        """Whether the bytes go over as they are."""
        return not self.via and self.src.dtype == self.dst.dtype


@dataclass(frozen=True, slots=True)
class Plan:
    """Copies in a fixed order."""

    copies: tuple[Copy, ...]

    @classmethod
    def of(cls, copies: Iterable[Copy]) -> Plan:
        """The plan that these copies make, in their order."""
        return copies if isinstance(copies, Plan) else cls(tuple(copies))

    def __iter__(self) -> Iterator[Copy]:
        return iter(self.copies)

    def __len__(self) -> int:
        return len(self.copies)

    @property
    def nbytes_read(self) -> int:
        """Bytes of the sources that the copies need."""
        return sum(copy.src.nbytes for copy in self.copies)

    @property
    def nbytes_written(self) -> int:
        """Bytes that the copies write."""
        return sum(copy.dst.nbytes for copy in self.copies)

    def check(self) -> None:
        """Refuse a plan that cannot be right whatever the order of its copies.

        Raises:
            CopyError: a region reaches beyond its storage, or a byte is written twice or both read and written.
        """
        touched: dict[Hashable, list[Touch]] = {}
        for index, copy in enumerate(self.copies):
            if not copy.dst.numel:
                continue  # nothing moves, and views of empty tensors begin behind their storage
            for region, writes in ((copy.src, False), (copy.dst, True)):
                start, stop = region.span
                if start < 0 or stop > region.storage.nbytes or min(region.stride, default=0) < 0:
                    raise CopyError(
                        f"'{copy.name}': bytes {start} to {stop} lie outside {region.storage.name}, "
                        f"which has {region.storage.nbytes} bytes."
                    )
                if start < stop:
                    touched.setdefault(region.storage.place, []).append(Touch(start, stop, region, index, writes))
            if _repeats(copy.dst):
                raise CopyError(f"'{copy.name}': the destination in {copy.dst.storage.name} repeats elements.")
        for touches in touched.values():
            conflict = find_conflict(touches)
            if conflict is not None:
                first, second = (self.copies[index] for index in conflict)
                raise CopyError(
                    f"'{second.name}' from {second.src.storage.name} to {second.dst.storage.name} and '{first.name}' "
                    f"from {first.src.storage.name} to {first.dst.storage.name} overlap: copies run in any order, "
                    "so no byte may be written that another copy reads or writes. Write somewhere else first."
                )

    def check_complete(self, targets: Iterable[Region]) -> None:
        """Make sure that the copies write every byte of `targets` exactly once, and no other.

        Args:
            targets: The regions to be filled; their bytes lie without gaps, in any order, and apart from each other.

        Raises:
            CopyError: as `check` does, and for a byte that no copy writes or a write that misses the targets.
        """
        self.check()
        wanted: dict[Hashable, list[Region]] = {}
        for target in targets:
            if target.numel:
                wanted.setdefault(target.storage.place, []).append(target)
        starts = {}
        for place, regions in wanted.items():
            regions.sort(key=lambda region: region.offset)
            starts[place] = [region.offset for region in regions]
        written = {place: [0] * len(regions) for place, regions in wanted.items()}
        for copy in self.copies:
            if copy.dst.numel == 0:
                continue
            place, (start, stop) = copy.dst.storage.place, copy.dst.span
            at = bisect_right(starts.get(place, []), start) - 1
            if at < 0 or stop > wanted[place][at].span[1]:
                raise CopyError(
                    f"'{copy.name}': bytes {start} to {stop} of {copy.dst.storage.name} are not to be written."
                )
            written[place][at] += copy.dst.nbytes
        for place, regions in wanted.items():
            for region, nbytes in zip(regions, written[place], strict=True):
                start, stop = region.span
                # Nothing is written twice, so counting finds every gap.
                if nbytes != stop - start:
                    raise CopyError(
                        f"{region.storage.name}: {stop - start - nbytes} of the bytes {start} to {stop} "
                        "would never be written."
                    )

    def reads(self) -> dict[str, int]:
        """Bytes read from each storage, by name, in the order of first use."""
        return _by_name(copy.src for copy in self.copies)

    def writes(self) -> dict[str, int]:
        """Bytes written to each storage, by name, in the order of first use."""
        return _by_name(copy.dst for copy in self.copies)

    def peak_memory(self, buffer_size: int) -> int:
        """Upper bound in bytes on the temporary memory that `execute` takes with this `buffer_size`."""
        direct = all(copy.is_raw and copy.src.is_contiguous and copy.dst.is_contiguous for copy in self.copies)
        memory = all(copy.src.storage.addressable or copy.dst.storage.addressable for copy in self.copies)
        return 0 if direct and memory else buffer_size

    def __str__(self) -> str:
        rows = [("read", name, nbytes) for name, nbytes in self.reads().items()]
        rows += [("write", name, nbytes) for name, nbytes in self.writes().items()]
        width = max((len(f"{nbytes:,}") for *_, nbytes in rows), default=0)
        head = f"{len(self)} copies, {self.nbytes_read:,} bytes read, {self.nbytes_written:,} bytes written"
        return "\n".join([head, *(f"  {verb:5}  {nbytes:>{width},}  {name}" for verb, name, nbytes in rows)])


def _repeats(region: Region) -> bool:
    if region.is_contiguous or not region.numel:
        return False
    expanded = any(n > 1 and step == 0 for n, step in zip(region.size, region.stride, strict=True))
    return expanded or Extent.of(Touch(*region.span, region, 0, True)).repeats


def _by_name(regions: Iterable[Region]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for region in regions:
        totals[region.storage.name] = totals.get(region.storage.name, 0) + region.nbytes
    return totals
