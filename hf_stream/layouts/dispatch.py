"""Find the patterns that fit a name, at a cost that does not grow with the number of patterns.

The patterns stand in a tree by their components, so that a name walks down one path (two where a placeholder stands
beside a literal) and only the few patterns met there are tried. Patterns that begin with a placeholder for several
components stand in a second tree, read from the end of the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from hf_stream.layouts.pattern import Pattern, is_literal

T = TypeVar("T")


class Dispatcher(Generic[T]):
    """Which of many (pattern, value) entries fit a name.

    >>> from hf_stream.layouts.pattern import compile_patterns
    >>> patterns = compile_patterns(["layers.{i}.up", "layers.{i}.down", "{prefix:*}.up"])
    >>> dispatcher = Dispatcher(zip(patterns, "abc"))
    >>> dispatcher.find("layers.7.up")
    [('a', {'i': '7'}), ('c', {'prefix': 'layers.7'})]
    """

    __slots__ = ("_backward", "_entries", "_forward")

    def __init__(self, entries: Iterable[tuple[Pattern, T]]) -> None:
        self._entries = tuple(entries)
        self._forward = _Node()
        self._backward = _Node()
        for number, (pattern, _) in enumerate(self._entries):
            ahead, behind = pattern.components, pattern.components[::-1]
            if _literals(behind) > _literals(ahead):
                self._backward.add(behind, number)
            else:
                self._forward.add(ahead, number)

    def find(self, name: str) -> list[tuple[T, dict[str, str]]]:
        """The values whose patterns fit `name`, each with what its placeholders stand for, in order of entry."""
        components = name.split(".")
        numbers = self._forward.candidates(components)
        numbers += self._backward.candidates(components[::-1])
        found = []
        for number in sorted(numbers):
            pattern, value = self._entries[number]
            bindings = pattern.match(name)
            if bindings is not None:
                found.append((value, bindings))
        return found


class _Node:
    __slots__ = ("any_component", "any_rest", "by_component", "here")

    def __init__(self) -> None:
        self.by_component: dict[str, _Node] = {}
        self.any_component: _Node | None = None
        self.here: list[int] = []
        self.any_rest: list[int] = []

    def add(self, components: Sequence[str | None], number: int) -> None:
        node = self
        for component in components:
            if component is None:
                node.any_rest.append(number)
                return
            if is_literal(component):
                node = node.by_component.setdefault(component, _Node())
            else:
                node.any_component = node.any_component or _Node()
                node = node.any_component
        node.here.append(number)

    def candidates(self, components: Sequence[str]) -> list[int]:
        numbers = list(self.any_rest)
        nodes = [self]
        for component in components:
            below = []
            for node in nodes:
                literal = node.by_component.get(component)
                if literal is not None:
                    below.append(literal)
                if node.any_component is not None:
                    below.append(node.any_component)
            if not below:
                return numbers
            nodes = below
            for node in nodes:
                numbers += node.any_rest
        for node in nodes:
            numbers += node.here
        return numbers


def _literals(components: Sequence[str | None]) -> int:
    """Literal components before the first placeholder for several components."""
    ahead = components[: components.index(None)] if None in components else components
    return sum(map(is_literal, ahead))
