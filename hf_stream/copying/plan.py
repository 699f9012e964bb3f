"""Copies, and lists of them that can be read and checked before a byte moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_stream.copying.region import Region
from hf_stream.errors import CopyError


@dataclass(frozen=True, slots=True)
class Copy:
    """One region's values into another of the same size.

    Attributes:
        via: dtypes the values pass through on the way from `src.dtype` to `dst.dtype`.
        name: the tensor this is part of, for errors.
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
        """Refuse a plan that cannot be right.

        Raises:
            CopyError: a region reaches beyond its storage.
        """
        for copy in self.copies:
            for region in (copy.src, copy.dst):
                if not region.in_bounds:
                    start, stop = region.span
                    raise CopyError(
                        f"'{copy.name}': bytes {start} to {stop} lie outside {region.storage.name}, "
                        f"which has {region.storage.nbytes} bytes."
                    )
