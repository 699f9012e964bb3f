"""Names that differ in their numbers alone, written as one: layers.{0..31}.norm.weight."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product

# A whole component between dots or slashes, as Python writes it: 07 is no number.
_NUMBER = re.compile(r"(?<![^./])(0|[1-9]\d*)(?![^./])")
_FEWEST = 3  # numbers that make steps

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class NameGroup:
    """Names that are alike, and what they share.

    Attributes:
        label: All of them in one, in braces as a shell expands them; the name itself if there is one.
        names: Each of them.
    """

    label: str
    names: tuple[str, ...]


def group_names(facts: Iterable[tuple[str, Hashable]]) -> list[NameGroup]:
    """Put names together that differ in their numbers alone and of which the same is true.

    A group is all names that its label stands for and no others; where numbers have gaps, the label shows them.

    Args:
        facts: Names, each once, and what is true of each.

    Returns:
        The groups, in the order of their first names.
    """
    alike: dict[tuple[Hashable, Sequence[str]], dict[Numbers, str]] = {}
    places: dict[str, int] = {}
    for name, fact in facts:
        literals, numbers = _taken_apart(name)
        alike.setdefault((fact, literals), {})[numbers] = name
        places[name] = len(places)
    groups = [
        NameGroup(_label(literals, box), tuple(members[numbers] for numbers in product(*box)))
        for (_, literals), members in alike.items()
        for box in _boxes(list(members))
    ]
    return sorted(groups, key=lambda group: min(places[name] for name in group.names))


def _taken_apart(name: str) -> tuple[tuple[str, ...], Numbers]:
    parts = _NUMBER.split(name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _boxes(points: Sequence[Numbers]) -> Iterator[tuple[list[int], ...]]:
    """The points as products of numbers: of the first of these, those that have the same rest go together."""
    if not points[0]:
        yield ()
        return
    rests: dict[int, list[Numbers]] = {}
    for first, *rest in points:
        rests.setdefault(first, []).append(tuple(rest))
    sharing: dict[frozenset[Numbers], list[int]] = {}
    for first, found in rests.items():
        sharing.setdefault(frozenset(found), []).append(first)
    for firsts in sharing.values():
        for box in _boxes(rests[firsts[0]]):
            yield sorted(firsts), *box


def _label(literals: Sequence[str], box: Sequence[Sequence[int]]) -> str:
    return literals[0] + "".join(_braces(numbers) + text for numbers, text in zip(box, literals[1:], strict=True))


def _braces(numbers: Sequence[int]) -> str:
    """Sorted numbers: 5, {0..31}, {0..30..2}, {0..2,5}."""
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    if step > 1 and len(numbers) >= _FEWEST and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{{{numbers[0]}..{numbers[-1]}..{step}}}"
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return "{" + ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) + "}"
