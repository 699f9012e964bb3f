"""What every rule is: patterns of names that go in, patterns of names that come out, and a function between."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts import from_config
from hf_stream.layouts.arguments import settle_fields
from hf_stream.layouts.pattern import Pattern, compile_patterns

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Move:
    """One family of groups: tensors whose names fit `srcs` with the same placeholders become those that `dsts` names.

    Attributes:
        srcs: One pattern for each tensor of a group; with `gathers`, one pattern for all of them.
        dsts: One pattern for each result; with `spreads`, one pattern for all of them; none when the tensor is dropped.
        key: The placeholders that tell groups apart.
        gathers: The placeholder that numbers the tensors of a group and is gone afterwards.
        spreads: The placeholder that numbers the results.
        count: How many tensors a group has; None when only the end of the input tells.
    """

    srcs: tuple[Pattern, ...]
    dsts: tuple[Pattern, ...]
    key: tuple[str, ...]
    gathers: str | None = None
    spreads: str | None = None
    count: int | None = 1


@dataclass(frozen=True, repr=False)
class Rule(ABC):
    """One line of a `Layout`. Rules are immutable, and equal when they say the same.

    Those who write a subclass (a frozen dataclass, `repr=False`) guarantee that `run` uses only functional operations
    (no writes into its arguments, no look at their values), so that it works on tensors without data.

    Args:
        optional: Whether nothing is wrong when no tensor's name fits. Otherwise that is said, or refused.
    """

    optional: bool = field(default=False, kw_only=True)

    @property
    def alternatives(self) -> Sequence[Rule]:
        """The rules that do the work, one of which must find something: this one, but for `AnyOf`."""
        return (self,)

    @property
    def needs_config(self) -> bool:
        """Whether a model's config tells some of its arguments."""
        return from_config.needs_config(self)

    def with_config(self, config: object) -> Rule:
        """The same rule with what a config tells; None if there is none."""
        return from_config.with_config(self, config)

    @cached_property
    @abstractmethod
    def moves(self) -> tuple[Move, ...]:
        """The families of groups this rule works on; computed, and so checked, when the rule is made."""

    def run(self, group: Sequence[Named]) -> Sequence[torch.Tensor]:
        """Turn the tensors of one group into its results; by default they stay what they are.

        Args:
            group: Names and tensors, in the order of the patterns, or of the numbers that a placeholder stands for.

        Raises:
            LayoutError: shapes or dtypes do not fit; says the fact and the remedy, the caller adds names and rule.
        """
        return [tensor for _, tensor in group]

    @abstractmethod
    def prefixed(self, prefix: str) -> Rule:
        """The same rule for names that all begin with `prefix`."""

    def invert(self) -> Rule:
        """The rule that undoes this one.

        Raises:
            LayoutError: nothing can undo it.
        """
        raise LayoutError(f"{self!r} cannot be inverted: it loses what it takes away.")

    def settle(self) -> None:  # noqa: B027, most rules have nothing to settle
        """Look at the arguments, and put them into the form they have from now on; their types are right already.

        Raises:
            LayoutError: One of them cannot be, or they do not go together.
        """

    def __post_init__(self) -> None:
        settle_fields(self)
        self.settle()
        _ = self.moves

    def __repr__(self) -> str:
        """As one would write it: arguments that have their default are left out."""
        words = []
        # What all rules have comes last.
        for entry in sorted(dataclasses.fields(self), key=lambda entry: bool(entry.kw_only)):
            value = getattr(self, entry.name)
            if entry.default is dataclasses.MISSING:
                words.append(word(value))
            elif value != entry.default:
                words.append(f"{entry.name}={word(value)}")
        return f"{type(self).__name__}({', '.join(words)})"


def as_optional_as(rule: Rule, other: Rule) -> Rule:
    """`rule`, optional if and only if `other` is."""
    if rule.optional == other.optional:
        return rule
    changed = copy.copy(rule)
    object.__setattr__(changed, "optional", other.optional)
    return changed


def group_move(rule: Rule, srcs: Sequence[str], dsts: Sequence[str]) -> Move:
    """A move from one tensor per source to one per destination; all must have the same placeholders.

    Raises:
        LayoutError: there are no sources or destinations, or their placeholders differ.
    """
    if not srcs or not dsts:
        raise LayoutError(f"{rule!r}: a rule needs at least one source and one destination.")
    patterns = compile_patterns([*srcs, *dsts])
    for pattern in patterns:
        if set(pattern.fields) != set(patterns[0].fields):
            raise LayoutError(
                f"{rule!r}: '{pattern.text}' and '{patterns[0].text}' must have the same placeholders, "
                f"got {_braces(pattern.fields)} and {_braces(patterns[0].fields)}."
            )
    return Move(patterns[: len(srcs)], patterns[len(srcs) :], patterns[0].fields, count=len(srcs))


def numbered_move(rule: Rule, many: str, one: str, count: int | None, *, gather: bool) -> Move:
    """A move between the tensors that a placeholder of `many` numbers and the single tensor `one`.

    Raises:
        LayoutError: `many` does not have exactly one placeholder more than `one`.
    """
    written_many, written_one = compile_patterns([many, one])
    extra = [field for field in written_many.fields if field not in written_one.fields]
    if len(extra) != 1 or len(written_many.fields) != len(written_one.fields) + 1:
        raise LayoutError(
            f"{rule!r}: '{many}' must have the placeholders of '{one}' and one more, which numbers the tensors; "
            f"got {_braces(written_many.fields)} and {_braces(written_one.fields)}."
        )
    if count is not None and count < 1:
        raise LayoutError(f"{rule!r}: count must be at least 1, got {count}.")
    pattern_many, pattern_one = compile_patterns([many, one], {extra[0]: "int"})
    if gather:
        return Move((pattern_many,), (pattern_one,), pattern_one.fields, gathers=extra[0], count=count)
    return Move((pattern_one,), (pattern_many,), pattern_one.fields, spreads=extra[0])


def texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """One pattern or several, as several."""
    return (value,) if isinstance(value, str) else tuple(value)


def shape_text(tensor: torch.Tensor) -> str:
    """A shape as error messages write it: `[4096, 1024]`."""
    return str(list(tensor.shape))


def checked_dim(tensor: torch.Tensor, dim: int, extra: int = 0) -> int:
    """`dim` counted from the front, in a tensor that is about to get `extra` more dimensions.

    Raises:
        LayoutError: the tensor has no such dimension.
    """
    ndim = tensor.ndim + extra
    if not -ndim <= dim < ndim:
        raise LayoutError(f"dimension {dim} does not exist in shape {shape_text(tensor)}. Change dim=.")
    return dim % ndim


def _braces(fields: Sequence[str]) -> str:
    return " ".join(f"{{{field}}}" for field in fields) or "none"


def word(value: object) -> str:
    """An argument as one would write it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(word, value))}]"
    return getattr(value, "__qualname__", None) or repr(value)
