"""Sizes in bytes as people give them: whole numbers, and text such as "5GB" or "64MiB"."""

from __future__ import annotations

import operator
import re
from typing import Final

from hf_stream.errors import ArgumentError, ArgumentTypeError

_UNITS: Final = {
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_BY_UPPER: Final = {unit.upper(): nbytes for unit, nbytes in _UNITS.items()}
_TEXT: Final = re.compile(r"(?P<number>.*?)(?P<unit>[A-Za-z]*)", re.DOTALL)


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB", "0.5 MB" or "64MiB": a number, and KB to TB (powers of 1000) or KiB to TiB (1024).

    Raises:
        ArgumentError: The text is not such a size (a `ValueError`).
    """
    found = _TEXT.fullmatch(text.strip())
    assert found is not None, "it matches any text"
    number, unit = found["number"].strip(), found["unit"]
    if unit.upper() not in _BY_UPPER:
        fact = f"unit '{unit}' is not one of {', '.join(_UNITS)}" if unit else "it has no unit"
        raise ArgumentError(f"size '{text}': {fact}. Write it like '5GB'.")
    try:
        return int(float(number) * _BY_UPPER[unit.upper()])
    except (ValueError, OverflowError):
        raise ArgumentError(f"size '{text}': '{number}' is not a finite number. Write it like '5GB'.") from None


def nbytes_of(size: object, argument: str) -> int:
    """The bytes that an argument stands for: at least one.

    Args:
        size: A whole number (also 5e9, and one of numpy's) or a text for `parse_size`.
        argument: What it is called, for errors.

    Raises:
        ArgumentError: It is no size, or leaves no room for anything.
        ArgumentTypeError: It is neither a number nor text.
    """
    if isinstance(size, str):
        try:
            nbytes = parse_size(size)
        except ArgumentError as error:
            raise ArgumentError(f"{argument}=: {error}") from None
    else:
        nbytes = _whole_number(size, argument)
    if nbytes < 1:
        raise ArgumentError(f"{argument}= is {size!r}, which is room for nothing; pass at least 1 byte, such as '64MB'")
    return nbytes


def _whole_number(size: object, argument: str) -> int:
    if isinstance(size, float):
        if not size.is_integer():
            raise ArgumentError(f"{argument}= is {size!r}, and bytes are counted in whole numbers")
        return int(size)
    try:
        if isinstance(size, bool):
            raise TypeError
        return operator.index(size)  # type: ignore[arg-type]  # that is what is found out
    except TypeError:
        raise ArgumentTypeError(
            f"{argument}= is {size!r:.100}, a {type(size).__name__}; pass a number of bytes, or text such as '5GB'"
        ) from None
