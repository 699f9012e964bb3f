"""Some of the tensors of a checkpoint, by patterns as huggingface_hub has them for files."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import translate
from itertools import islice
from typing import TypeAlias

from hf_stream.errors import CheckpointError

_SHOWN = 3

Patterns: TypeAlias = str | Sequence[str]


def select_names(
    names: Collection[str],
    allow_patterns: Patterns | None = None,
    ignore_patterns: Patterns | None = None,
    *,
    where: object,
) -> Collection[str]:
    """The names that match one of the first patterns (None: all do) and none of the second, in their order.

    Args:
        names: Of tensors.
        allow_patterns: One pattern or several, as `fnmatch.fnmatchcase` takes them: a star stands for dots as well.
        ignore_patterns: Likewise.
        where: What errors call the place of the tensors.

    Raises:
        CheckpointError: A pattern matches no name, and so cannot be what was meant.
    """
    selected = names
    if allow_patterns is not None:
        allowed = _matching(names, allow_patterns, where)
        selected = [name for name in selected if name in allowed]
    if ignore_patterns is not None:
        ignored = _matching(names, ignore_patterns, where)
        selected = [name for name in selected if name not in ignored]
    return selected


def _matching(names: Collection[str], patterns: Patterns, where: object) -> set[str]:
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = set(filter(re.compile(translate(pattern)).match, names))
        if not matching:
            some = ", ".join(f"'{name}'" for name in islice(names, _SHOWN))
            raise CheckpointError(
                f"'{where}': pattern '{pattern}' matches none of the {len(names)} tensors, such as {some}"
            )
        found |= matching
    return found
