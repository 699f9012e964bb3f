"""Rules that are alternatives: what one family of models calls so, and another otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_stream.errors import LayoutError
from hf_stream.layouts.arguments import checked_rules
from hf_stream.layouts.rule import Move, Rule


@dataclass(frozen=True, repr=False)
class AnyOf(Rule):
    """Rules of which one at least must find something; all others may find nothing.

        AnyOf([Rename("wte.weight", "embed.weight"), Rename("word_embeddings.weight", "embed.weight")])

    Args:
        rules: The alternatives.
    """

    rules: Iterable[Rule]

    def settle(self) -> None:
        object.__setattr__(self, "rules", tuple(checked_rules(self.rules, "AnyOf", Rule)))
        if not self.alternatives:
            raise LayoutError(f"{self!r}: rules are wanted, in a list.")

    @property
    def alternatives(self) -> Sequence[Rule]:
        """The rules."""
        return tuple(self.rules)

    @property
    def needs_config(self) -> bool:
        return any(rule.needs_config for rule in self.alternatives)

    def with_config(self, config: object) -> AnyOf:
        return AnyOf([rule.with_config(config) for rule in self.alternatives], optional=self.optional)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        return tuple(move for rule in self.alternatives for move in rule.moves)

    def prefixed(self, prefix: str) -> AnyOf:
        return AnyOf([rule.prefixed(prefix) for rule in self.alternatives])

    def invert(self) -> AnyOf:
        return AnyOf([rule.invert() for rule in self.alternatives])
