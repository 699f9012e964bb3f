"""What arguments may be: those of rules, told from the annotations of their fields, and rules themselves."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any, Final

from hf_stream.errors import ArgumentTypeError
from hf_stream.layouts.from_config import FromConfig
from hf_stream.lazy.given import kind


def whole_number(value: Any, what: str) -> int:
    """A whole number, also one of numpy's.

    Raises:
        ArgumentTypeError: It is something else; `what` says in words where.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{what} is {value!r:.100}; pass a whole number") from None


def settle_fields(rule: Any) -> None:
    """Refuse what a field of a rule, a frozen dataclass, cannot be, and make whole numbers Python's own.

    Raises:
        ArgumentTypeError: A field is of another type than its annotation says.
    """
    for entry in dataclasses.fields(rule):
        settle = _BY_ANNOTATION.get(str(entry.type))
        value = getattr(rule, entry.name)
        optional = str(entry.type).endswith("| None")
        if settle is not None and not (optional and value is None) and not isinstance(value, FromConfig):
            object.__setattr__(rule, entry.name, settle(value, f"{type(rule).__name__}: {entry.name}="))


def checked_rules(rules: Any, taker: str, *kinds: type) -> list[Any]:
    """Rules, if they are.

    Args:
        rules: Several of them.
        taker: What takes them, for errors.
        kinds: What a rule may be.

    Raises:
        ArgumentTypeError: They are something else; says what was meant, if that can be told.
    """
    if isinstance(rules, kinds):
        raise ArgumentTypeError(f"{taker} takes a list of rules; put it in brackets: {taker}([{rules!r}])")
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ArgumentTypeError(f"{taker} takes a list of rules, got {kind(rules)}; {_rule_instead(rules, kinds)}")
    listed = list(rules)
    for rule in listed:
        if not isinstance(rule, kinds):
            raise ArgumentTypeError(f"{taker}: {kind(rule)} is no rule; {_rule_instead(rule, kinds)}")
    return listed


def _rule_instead(value: object, kinds: tuple[type, ...]) -> str:
    """What to write in place of something that is no rule."""
    if isinstance(value, str):
        old, arrow, new = (part.strip() for part in value.partition("->"))
        return f"write Rename('{old}', '{new}')" if arrow else "a rule is an object, such as Rename('old', 'new')"
    if isinstance(value, type) and issubclass(value, kinds):
        return f"write {value.__name__}(...), with its arguments"
    if hasattr(type(value), "inverse"):
        return "it is a layout of its own: let it follow, as in Layout([...]) | it"
    if callable(value):
        return "call it, if it makes a layout; a function of tensors goes into Apply(srcs, dsts, function)"
    return "a rule is an object, such as Rename('old', 'new')"


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{what} is {value!r:.100}; pass a text")
    return value


def _texts(value: Any, what: str) -> Any:
    if isinstance(value, str):
        return value
    return _each(value, what, _text, "texts")


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    return _each(value, what, whole_number, "whole numbers")


def _each(value: Any, what: str, settle: Callable[[Any, str], Any], of: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{what} is {value!r:.100}; pass a list of {of}")
    return tuple(settle(item, f"{what} has an element that") for item in value)


def _yes_or_no(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{what} is {value!r:.100}; pass True or False")
    return value


def _function(value: Any, what: str) -> Any:
    if not callable(value):
        raise ArgumentTypeError(f"{what} is {value!r:.100}; pass a function")
    return value


_OF_TENSORS: Final = "Callable[..., torch.Tensor | Sequence[torch.Tensor]]"
_BY_ANNOTATION: Final[dict[str, Callable[[Any, str], Any]]] = {
    "str": _text,
    "str | Sequence[str]": _texts,
    "Sequence[str]": _texts,
    "tuple[str, ...]": _texts,
    "int": whole_number,
    "int | None": whole_number,
    "int | FromConfig | None": whole_number,
    "Sequence[int] | None": _numbers,
    "Sequence[int] | FromConfig | None": _numbers,
    "bool": _yes_or_no,
    _OF_TENSORS: _function,
    f"{_OF_TENSORS} | None": _function,
}
