"""What the patterns of one stage have found, and what those that found nothing may have meant."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hf_stream.checkpoint.matches import RuleMatches
from hf_stream.layouts.pattern import Pattern, is_literal
from hf_stream.layouts.rule import Move, Rule

_LISTED = 3
# Of how many rules it is worked out what may have been meant: nobody reads more.
_TOLD = 3
_LIKE = 0.7
_CANDIDATES = 2000
_NUMBER = re.compile(r"\d+")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


class Found:
    """What one run of a stage has met.

    Attributes:
        names: All names, in their order.
        moves: How many tensors have gone each way.
    """

    __slots__ = ("moves", "names")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.moves: Counter[Move] = Counter()

    def matches(self, rules: Iterable[Rule]) -> list[RuleMatches]:
        """What each rule has found."""
        # Names that differ in numbers only are as good as one.
        seen: dict[str, str] = {}
        for name in self.names:
            seen.setdefault(_NUMBER.sub("0", name), name)
        candidates = list(seen.values())[:_CANDIDATES]
        matches: list[RuleMatches] = []
        told = 0
        for rule in rules:
            matches.append(self._of_rule(rule, candidates if told < _TOLD else ()))
            told += bool(matches[-1].problem)
        return matches

    def _of_rule(self, rule: Rule, candidates: Sequence[str]) -> RuleMatches:
        moves = [move for leaf in rule.alternatives for move in leaf.moves]
        tensors = sum(self.moves[move] for move in moves)
        lost = [move for move in moves if not self.moves[move]]
        if rule.optional or not lost or (tensors and len(rule.alternatives) > 1):
            return RuleMatches(repr(rule), tensors)
        which = f"'{lost[0].srcs[0].text}' fits no name, " if tensors else ""
        return RuleMatches(repr(rule), tensors, which + _meant(lost, candidates))


def _meant(moves: Sequence[Move], names: Sequence[str]) -> str:
    """What may be behind patterns that nothing fits, in words."""
    close = _nearest([pattern for move in moves for pattern in move.srcs], names)
    # A result that may have any name says nothing.
    results = [p for move in moves for p in move.dsts if not close or any(map(is_literal, p.components))]
    made = next((name for name in names if any(p.match(name) for p in results)), None)
    if made is not None:
        return f"'{made}' has the form that it makes; wrong direction, or already converted?"
    if close:
        return f"the nearest name{' is' if len(close) == 1 else 's are'} {', '.join(map(repr, close))}"
    return "no name resembles its patterns"


def _nearest(patterns: Sequence[Pattern], names: Sequence[str]) -> list[str]:
    """A few names that a misspelt pattern may have been meant for, the most alike first."""
    scores: dict[str, float] = {}
    for pattern in patterns:
        for name in names:
            matcher = difflib.SequenceMatcher(None, *_aligned(pattern, name), autojunk=False)
            if matcher.real_quick_ratio() >= _LIKE and matcher.quick_ratio() >= _LIKE:
                scores[name] = max(scores.get(name, 0.0), matcher.ratio())
    alike = sorted((name for name in scores if scores[name] >= _LIKE), key=lambda name: -scores[name])
    return alike[:_LISTED]


def _aligned(pattern: Pattern, name: str) -> tuple[str, str]:
    """The part of a pattern that is spelled out, and what stands there in a name."""
    components = name.split(".")
    written: list[str] = []
    meant: list[str] = []
    for spelled, there in _ends(pattern, components):
        meant += there
        for i, component in enumerate(spelled):
            # Whatever stands in the place of a placeholder is as good as it.
            rest = there[i] if i < len(there) else ""
            written.append(rest if _PLACEHOLDER.fullmatch(component) else _PLACEHOLDER.sub("", component))
    return ".".join(written), ".".join(meant)


def _ends(pattern: Pattern, components: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Components before the first and after the last placeholder for several, and as many of a name's."""
    spelled = pattern.text.split(".")
    many = [i for i, component in enumerate(pattern.components) if component is None]
    if not many:
        yield spelled, components
        return
    head, tail = spelled[: many[0]], spelled[many[-1] + 1 :]
    yield head, components[: len(head)]
    yield tail, components[len(components) - len(tail) :] if tail else []
