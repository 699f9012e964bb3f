"""What running a conversion would do now: read, keep, write, carry and replace; the table that `print(plan)` shows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.utils.text import Table, count, shortened, size

if TYPE_CHECKING:
    from hf_stream.checkpoint.conversion import Conversion
    from hf_stream.checkpoint.files import ShardFile

_RULE_LENGTH = 88


@dataclass(frozen=True)
class Prospect:
    """A conversion, and what it finds at its destination.

    Attributes:
        conversion: What is planned.
        kept: The files that an interrupted run has finished.
        replaced: Files at the destination that go or are replaced: bytes by name.
        buffer_size: Memory for bytes on their way.
    """

    conversion: Conversion
    kept: tuple[ShardFile, ...] = ()
    replaced: Mapping[str, int] = field(default_factory=dict)
    buffer_size: int = DEFAULT_BUFFER_SIZE

    @cached_property
    def written(self) -> tuple[ShardFile, ...]:
        """The weight files that are left to write."""
        kept = {shard.name for shard in self.kept}
        return tuple(shard for shard in self.conversion.files.shards if shard.name not in kept)

    @cached_property
    def nbytes_read(self) -> Mapping[str, int]:
        """Bytes to read of each source file, by path."""
        return self.conversion.of_files(self.written).nbytes_read()

    @property
    def nbytes_written(self) -> int:
        """Bytes of all files that are left to write, but for those that are carried."""
        return self.conversion.files.nbytes - sum(shard.header.nbytes for shard in self.kept)

    @property
    def tables(self) -> list[Table]:
        """All of it, for people: rules if there are any, and files."""
        rules = [(shortened(entry.rule, _RULE_LENGTH), f"{entry.tensors:,}") for entry in self.conversion.matches.rules]
        return [*([Table(("rule", "tensors"), rules, right=("tensors",))] if rules else []), self._files]

    @property
    def _files(self) -> Table:
        files, tensors = self.conversion.files, sum(len(shard.header.tensors) for shard in self.written)
        rows = [("read", self._short(file), "", size(n)) for file, n in self.nbytes_read.items()]
        for what, shards in (("keep", self.kept), ("write", self.written)):
            rows += [(what, s.name, f"{len(s.header.tensors):,}", size(s.header.nbytes)) for s in shards]
        rows += [("write", name, "", size(len(content))) for name, content in files.small.items()]
        rows += [("carry", name, "", size(nbytes)) for name, nbytes in self._carried()]
        rows += [("replace", name, "", size(nbytes)) for name, nbytes in self.replaced.items()]
        total = (
            f"reads {size(sum(self.nbytes_read.values()))}, "
            f"writes {count(tensors, 'tensor')} in {size(self.nbytes_written)}, "
            f"needs at most {size(self.conversion.peak_nbytes(self.buffer_size))} of memory"
        )
        return Table(
            ("what", "file", "tensors", "bytes"), rows, right=("tensors", "bytes"), flexible="file", footer=(total,)
        )

    @property
    def data(self) -> dict[str, Any]:
        """All of it, for programs, with the tensors of each file."""
        files = self.conversion.files
        return {
            "path": str(self.conversion.source.path),
            "nbytes_read": sum(self.nbytes_read.values()),
            "nbytes_written": self.nbytes_written,
            "peak_nbytes": self.conversion.peak_nbytes(self.buffer_size),
            "rules": [{"rule": entry.rule, "tensors": entry.tensors} for entry in self.conversion.matches.rules],
            "read": [{"file": file, "nbytes": nbytes} for file, nbytes in self.nbytes_read.items()],
            "keep": list(map(_facts, self.kept)),
            "write": [
                *map(_facts, self.written),
                *({"file": name, "nbytes": len(content), "tensors": []} for name, content in files.small.items()),
            ],
            "carry": [{"file": name, "nbytes": nbytes} for name, nbytes in self._carried()],
            "replace": [{"file": name, "nbytes": nbytes} for name, nbytes in self.replaced.items()],
        }

    def _short(self, file: str) -> str:
        """A source file's name; in a repository of several checkpoints, with its folder."""
        if len(self.conversion.folders) > 1:
            return os.path.relpath(file, self.conversion.directory)
        return os.path.basename(file) or file

    def _carried(self) -> Iterator[tuple[str, int]]:
        for path in self.conversion.carried:
            yield self.conversion.name_of(path), path.stat().st_size


def _facts(shard: ShardFile) -> dict[str, Any]:
    tensors = [
        {"name": name, "dtype": info.dtype, "shape": info.shape, "nbytes": info.nbytes}
        for name, info in shard.header.tensors.items()
    ]
    return {"file": shard.name, "nbytes": shard.header.nbytes, "tensors": tensors}
