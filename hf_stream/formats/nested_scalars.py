"""Plain values and dict keys as JSON, exactly: what JSON cannot tell gets a tag."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable
from types import NoneType
from typing import Any, Final, TypeAlias

from hf_stream.formats.strict_json import Pairs

Json: TypeAlias = Any

_MAX_KEY_DEPTH: Final = 10
_SHOWN: Final = 60
_INT64: Final = range(-(2**63), 2**64)
_HEX_INT: Final = re.compile(r"-?0x[0-9a-f]+")
_HEX_FLOAT: Final = re.compile(r"[0-9a-f]{16}")
_NAN: Final = struct.pack(">d", math.nan)


def is_plain(value: object) -> bool:
    """Whether `plain_node` can tell the value; subclasses it cannot."""
    return type(value) in _NODES


def plain_node(value: object) -> Json:
    """The node of None, a bool, int, float, complex, str or bytes."""
    return _NODES[type(value)](value)


def is_key(value: object, depth: int = 0) -> bool:
    """Whether it can be a key: plain values and tuples of them, a few deep, but no NaN.

    Nobody could ask for a NaN, as it is not equal to itself, and two of them in one dict would share a path.
    """
    if type(value) is tuple:
        return depth < _MAX_KEY_DEPTH and all(is_key(item, depth + 1) for item in value)
    return is_plain(value) and not (isinstance(value, float | complex) and value != value)


def key_node(key: object) -> Json:
    """The node of a key."""
    return {"tuple": list(map(key_node, key))} if isinstance(key, tuple) else plain_node(key)


def fits_64_bits(number: int) -> bool:
    """Whether it is written as a plain number."""
    return number in _INT64


def shown(value: object) -> str:
    """The value as code, for people to read, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no numbers of thousands of digits
        return f"a large {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def is_unicode(text: str) -> bool:
    """Whether it holds no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _same(value: Json) -> Json:
    return value


def _int(value: int) -> Json:
    return value if fits_64_bits(value) else {"int": hex(value)}


def _float(value: float) -> Json:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"float": str(value) if bits == _NAN or math.isinf(value) else bits.hex()}


def _complex(value: complex) -> Json:
    return {"complex": [_float(value.real), _float(value.imag)]}


def _str(value: str) -> Json:
    return value if is_unicode(value) else {"str": _base64(value.encode("utf-8", "surrogatepass"))}


def _bytes(value: bytes) -> Json:
    return {"bytes": _base64(value)}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


_NODES: Final[dict[type, Callable[[Any], Json]]] = {
    NoneType: _same,
    bool: _same,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
}


def _parse_int(text: str) -> int:
    if not _HEX_INT.fullmatch(text):
        raise ValueError
    return int(text, 16)


def _parse_float(text: str) -> float:
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if not _HEX_FLOAT.fullmatch(text):
        raise ValueError
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


def _parse_complex(parts: Json) -> complex:
    real, imaginary = map(_parse_part, parts)
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError
    return complex(real, imaginary)


def _parse_part(part: Json) -> Json:
    fields: dict[str, Any] = dict(part) if isinstance(part, Pairs) else {}
    return _parse_float(fields["float"]) if fields else part


def _parse_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _parse_str(text: str) -> str:
    return _parse_bytes(text).decode("utf-8", "surrogatepass")


# What is under a tag becomes its value; ValueError, TypeError or KeyError for what is none.
PARSERS: Final[dict[str, Callable[[Json], object]]] = {
    "int": _parse_int,
    "float": _parse_float,
    "complex": _parse_complex,
    "bytes": _parse_bytes,
    "str": _parse_str,
}
