"""What is in a checkpoint, as a table: layers that are alike in one line."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from hf_stream.utils.names import NameGroup, group_names
from hf_stream.utils.text import Table, count, size

if TYPE_CHECKING:
    from hf_stream.checkpoint.open import Checkpoint


def overview(checkpoint: Checkpoint, names: Collection[str] | None = None, *, full: bool = False) -> Table:
    """The tensors with their types, shapes, bytes and files.

    Args:
        checkpoint: Whose.
        names: Which of them; all by default.
        full: Whether each has a line of its own.
    """
    facts = {name: checkpoint.facts(name) for name in (checkpoint if names is None else names)}
    groups = [NameGroup(name, (name,)) for name in facts] if full else group_names(facts.items())
    rows: list[tuple[str, ...]] = []
    for group in groups:
        fact = facts[group.names[0]]
        files = dict.fromkeys(map(checkpoint.file_of, group.names))
        rows.append(
            (
                group.label,
                f"{len(group.names):,}",
                fact.dtype,
                str(list(fact.shape)),
                size(fact.nbytes * len(group.names)),
                next(iter(files)) if len(files) == 1 else count(len(files), "file"),
            )
        )
    heads = ["name", "tensors", "dtype", "shape", "bytes", "file"]
    if len(groups) == len(facts):
        del heads[1]
        rows = [(name, *cells) for name, _, *cells in rows]
    elements = sum(math.prod(fact.shape) for fact in facts.values())
    taken = {checkpoint.file_of(name) for name in facts} if names is not None else checkpoint.files
    total = (
        f"{count(len(facts), 'tensor')} in {count(len(taken), 'file')}: "
        f"{count(elements, 'element')}, {size(sum(fact.nbytes for fact in facts.values()))}"
    )
    return Table(heads, rows, right=("tensors", "bytes"), footer=(total,), flexible="name", expendable="file")
