"""JSON read as strictly as the safetensors library reads it, with every pair of an object kept."""

from __future__ import annotations

import json
import math
import re
from typing import Final, NoReturn

_U64_DIGITS: Final = 19  # every integer of so many digits fits 64 bits
_U64_MAX: Final = 2**64 - 1

# Half a surrogate pair is no text, though Python's decoder lets it through. Backslashes stand only in strings, and each
# begins an escape: matching escape after escape never loses step. The group catches a surrogate that is not of a pair.
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)")


class Pairs(tuple[tuple[str, object], ...]):
    """A JSON object as its (name, value) pairs in the order of the text, repeated names included."""

    __slots__ = ()


def decode(text: str) -> object:
    """Decode one JSON document.

    Objects become `Pairs`, arrays lists, and numbers ints if an unsigned 64-bit integer holds them, else floats.

    Raises:
        ValueError: The text is not JSON, or not JSON to a strict reader: NaN, Infinity, a number beyond the range of a
            64-bit float, a control character or half a surrogate pair in a string.
        RecursionError: It nests deeper than the interpreter can follow.
    """
    value: object = _DECODER.decode(text)
    if _SURROGATE.search(text):
        for escape in _ESCAPE.finditer(text):
            if escape[1]:
                raise ValueError(f"half a surrogate pair '\\{escape[1]}' at character {escape.start()}")
    return value


def nesting(value: object) -> int:
    """Number of containers around the innermost value: 0 for a scalar, 2 for `[[1]]`."""
    depth = 0
    layer = [value]
    while layer := [item for item in layer if isinstance(item, list | Pairs)]:
        depth += 1
        layer = [child for item in layer for child in _children(item)]
    return depth


def _children(container: list[object] | Pairs) -> list[object]:
    return [value for _, value in container] if isinstance(container, Pairs) else container


def _integer(text: str) -> int | float:
    # "-0" is a float to the library, so that it is no offset and no size.
    if len(text) <= _U64_DIGITS and text[0] != "-":
        return int(text)
    if text[0] != "-" and len(text) == _U64_DIGITS + 1 and (value := int(text)) <= _U64_MAX:
        return value
    return _float(text)


def _float(text: str) -> float:
    # Out of range is decided by the library's own rounding, so that the border lies on the same digit: it keeps the
    # leading digits that fit 64 bits (20 near the border) and multiplies them by a power of ten in floating point.
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    kept = digits[: _U64_DIGITS + 1]
    scale = _exponent(exponent) - len(fraction) + len(digits) - len(kept)
    if kept and scale > 0 and math.isinf(float(kept) * float(f"1e{scale}")):
        raise ValueError(f"number out of range: {text[:40]}")
    return float(text)


def _exponent(text: str) -> int:
    digits = text.lstrip("+-0")
    size = int(digits or 0) if len(digits) < 12 else 10**12  # no mantissa is long enough to bring such a one back
    return -size if text.startswith("-") else size


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=Pairs, parse_int=_integer, parse_float=_float, parse_constant=_constant, strict=True
)
