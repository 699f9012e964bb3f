"""Run the rules of one layout over a stream of named tensors, holding only what waits for the rest of its group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts.dispatch import Dispatcher
from hf_stream.layouts.found import Found
from hf_stream.layouts.rule import Move, Rule

Placed = tuple[int, str, torch.Tensor]
"""Where a result belongs (the position of the first tensor it is made of), its name, and the tensor."""


class Stage:
    """Rules side by side: each tensor goes to the one rule that has a pattern for its name, or passes through.

    Attributes:
        rules: The rules, in the order in which they were written.
        needs_config: Whether a model's config tells some of their arguments.
    """

    __slots__ = ("_dispatcher", "needs_config", "rules")

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.needs_config = any(rule.needs_config for rule in self.rules)
        self._dispatcher = Dispatcher(
            (pattern, _Source(leaf, move, number))
            for rule in self.rules
            for leaf in rule.alternatives
            for move in leaf.moves
            for number, pattern in enumerate(move.srcs)
        )

    def run(self, pairs: Iterable[tuple[str, torch.Tensor]], found: Found) -> Iterator[Placed]:
        """Yield each result as soon as its tensors have come; they are let go before it is yielded.

        Args:
            pairs: Names and tensors.
            found: Is told what the rules find.

        Raises:
            LayoutError: two rules have a pattern for one name, two results have one name, a group is incomplete at the
                end, or the tensors of a group do not fit their rule.
        """
        state = _State(self._dispatcher, found)
        for name, tensor in pairs:
            state.feed(name, tensor)
            del tensor
            while state.ready:
                yield state.ready.popleft()
        for _ in state.finish():
            while state.ready:
                yield state.ready.popleft()

    def __repr__(self) -> str:
        lines = "".join(f"\n    {rule!r}," for rule in self.rules)
        return f"Layout([{lines}\n])" if len(self.rules) > 1 else f"Layout({list(self.rules)!r})"


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """The value that the dispatcher finds: pattern `number` of a rule's move."""

    rule: Rule
    move: Move
    number: int


@dataclass(slots=True)
class _Group:
    """Tensors that wait for each other."""

    position: int
    rule: Rule
    move: Move
    bindings: dict[str, str]
    members: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)


class _State:
    """What one run remembers."""

    def __init__(self, dispatcher: Dispatcher[_Source], found: Found) -> None:
        self.ready: deque[Placed] = deque()
        self._found = found
        self._dispatcher = dispatcher
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._makers: dict[str, Rule | None] = {}

    def feed(self, name: str, tensor: torch.Tensor) -> None:
        position = len(self._found.names)
        self._found.names.append(name)
        fitting = self._dispatcher.find(name)
        if not fitting:
            self._put(position, name, tensor, None)
            return
        (source, bindings), *others = fitting
        if others:
            rules = " and ".join(dict.fromkeys(repr(entry.rule) for entry, _ in fitting))
            raise LayoutError(
                f"'{name}': more than one pattern fits, of {rules}. "
                "Narrow the patterns, or let one layout follow the other: Layout([...]) | Layout([...])."
            )
        move = source.move
        self._found.moves[move] += 1
        key = (move, *(bindings[placeholder] for placeholder in move.key))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(position, source.rule, move, bindings)
        number = int(bindings[move.gathers]) if move.gathers else source.number
        if number in group.members:
            raise LayoutError(f"'{name}' comes twice. Give each tensor once.")
        if move.gathers and move.count is not None and number >= move.count:
            raise LayoutError(
                f"'{name}': number {number} is beyond count={move.count} of {source.rule!r}. Change count=."
            )
        group.members[number] = (name, tensor)
        if len(group.members) == move.count:
            del self._groups[key]
            self._complete(group)

    def finish(self) -> Iterator[None]:
        """Complete the groups whose size only the end tells; stops after each, for its results to be taken."""
        groups = list(self._groups.values())
        self._groups.clear()
        incomplete = [group for group in groups if _missing(group)]
        if incomplete:
            raise LayoutError(_incomplete_text(incomplete))
        groups.reverse()
        while groups:
            self._complete(groups.pop())
            yield

    def _complete(self, group: _Group) -> None:
        move, bindings = group.move, group.bindings
        if not move.dsts:
            return
        members = [group.members[number] for number in sorted(group.members)]
        group.members.clear()
        try:
            results = group.rule.run(members)
        except LayoutError as fact:
            names = [name for name, _ in members]
            raise LayoutError(f"{_listed(names)}: {fact} Rule: {group.rule!r}") from fact.__cause__
        if move.spreads:
            (pattern,) = move.dsts
            for number, result in enumerate(results):
                name = pattern.format({**bindings, move.spreads: number})
                self._put(group.position, name, result, group.rule)
        else:
            for pattern, result in zip(move.dsts, results, strict=True):
                self._put(group.position, pattern.format(bindings), result, group.rule)

    def _put(self, position: int, name: str, tensor: torch.Tensor, maker: Rule | None) -> None:
        if name in self._makers:
            first, second = (_maker_text(rule) for rule in (self._makers[name], maker))
            raise LayoutError(
                f"'{name}' comes out twice: {first}, and {second}. Drop or rename one of them in a layout before this."
            )
        self._makers[name] = maker
        self.ready.append((position, name, tensor))


def _missing(group: _Group) -> list[str]:
    """Names that the group still waits for, or a few of them where a number tells them apart."""
    move, bindings = group.move, group.bindings
    if not move.gathers:
        return [pattern.format(bindings) for i, pattern in enumerate(move.srcs) if i not in group.members]
    (pattern,) = move.srcs
    count = move.count or max(group.members) + 1
    holes = (number for number in range(count) if number not in group.members)
    return [pattern.format({**bindings, move.gathers: number}) for number in islice(holes, 4)]


def _incomplete_text(groups: Sequence[_Group]) -> str:
    first = groups[0]
    present = [first.members[number][0] for number in sorted(first.members)]
    more = f" {len(groups) - 1} more groups are incomplete." if len(groups) > 1 else ""
    return (
        f"{_listed(_missing(first))} missing, which {first.rule!r} joins with {_listed(present)}.{more} "
        "Add what is missing, or narrow the rule to the tensors that are there."
    )


def _maker_text(rule: Rule | None) -> str:
    return "it passes through unchanged" if rule is None else f"{rule!r} makes it"


def _listed(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names[:3]]
    return ", ".join(quoted) + (", ..." if len(names) > 3 else "")
