"""What the rules of a layout have found, counted; a rule that has found nothing is said or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from hf_stream.errors import LayoutError
from hf_stream.utils.text import shortened

logger = logging.getLogger(__name__)

_LISTED = 3
_RULE_LENGTH = 160


@dataclass(frozen=True)
class RuleMatches:
    """What one rule of a layout has found.

    Attributes:
        rule: The rule, as it is written.
        tensors: How many tensors it has taken.
        problem: Which of its patterns nothing fits, and what may have been meant, in words; empty if all is well, also
            for an optional rule.
    """

    rule: str
    tensors: int
    problem: str = ""


@dataclass(frozen=True)
class Matches:
    """What all rules of a layout have found.

    Attributes:
        rules: One entry for each rule, in their order. None for functions and layouts that count nothing.
        tensors: How many tensors the layout was given.
        example: The name of one of them.
    """

    rules: tuple[RuleMatches, ...] = ()
    tensors: int = 0
    example: str = ""

    @classmethod
    def of(cls, rules: Iterable[RuleMatches], names: Iterable[str]) -> Matches:
        """The matches of rules among these names."""
        listed = list(names)
        return cls(tuple(rules), len(listed), listed[0] if listed else "")

    def then(self, later: Matches) -> Matches:
        """Those of a layout that another one follows."""
        return Matches(self.rules + later.rules, self.tensors or later.tensors, self.example or later.example)

    def problem(self) -> str | None:
        """What is wrong, as a sentence for people; None if every rule that must find something has done so."""
        wrong = [entry for entry in self.rules if entry.problem]
        if not wrong or not self.tensors:
            return None
        count = f"{len(self.rules)} rule{'s' * (len(self.rules) != 1)}"
        given = f"the {self.tensors} tensor{'s' * (self.tensors != 1)}"
        if not any(entry.tensors for entry in self.rules):
            fact = f"the layout matched none of {given}, e.g. '{self.example}'"
        else:
            fact = f"{len(wrong)} of the layout's {count} found nothing among {given}"
        facts = "; ".join(f"{shortened(entry.rule, _RULE_LENGTH)}: {entry.problem}" for entry in wrong[:_LISTED])
        more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        stop = "" if facts.endswith("?") and not more else "."
        return f"{fact}. {facts}{more}{stop} Correct or remove it; a rule that may find nothing takes optional=True."

    def report(self, *, strict: bool = False) -> None:
        """Warn of rules that have found nothing and are not optional, or refuse them.

        Raises:
            LayoutError: There is one, and `strict`.
        """
        problem = self.problem()
        if problem is None:
            return
        if strict:
            raise LayoutError(problem)
        logger.warning("%s", problem)
