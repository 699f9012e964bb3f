"""A checkpoint in parts that a pattern finds, such as "reshard-model_part-*.pt": their order, and what names become."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hf_stream.errors import MissingError


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards: `*`, `?` or `[...]`."""
    return glob.has_magic(path)


def find_parts(pattern: str) -> list[str]:
    """The files that a pattern finds, ordered by all the numbers in their whole paths: part 10 comes after part 9.

    Raises:
        MissingError: There is none.
    """
    parts = [path for path in glob.glob(pattern) if os.path.isfile(path)]
    if not parts:
        raise MissingError(f"'{pattern}' finds no file; quote it for the shell, and check the directory")
    return sorted(parts, key=lambda path: ([int(number) for number in re.findall(r"\d+", path)], path))


def part_names(parts: Sequence[Collection[str]]) -> list[Mapping[str, str]]:
    """For each part the names of its tensors in the checkpoint, and what they are in the part.

    If no two parts have a name in common they keep their names. Else every tensor is called "{name}.part_{i}", where i
    counts the parts from 0, for a layout that puts them together.
    """
    times = Counter(name for part in parts for name in part)
    if all(count == 1 for count in times.values()):
        return [{name: name for name in part} for part in parts]
    return [{f"{name}.part_{number}": name for name in part} for number, part in enumerate(parts)]
