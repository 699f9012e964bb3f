"""Readable names for the places in a nesting, no two alike."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from hf_stream.formats.nested_scalars import fits_64_bits, is_key, key_node

Keys: TypeAlias = Sequence[object]

_ROOT: Final = "value"
_BARE: Final = re.compile(r"[\w.+:@-]+")
# What other keys than text look like, and the names that files keep for themselves.
_NOT_BARE: Final = frozenset({"None", "True", "False", "__metadata__", "__structure__"})


def path_of(keys: Keys) -> str:
    """The name of the place to which the keys lead: ["state", 0, "exp_avg"] -> "state/0/exp_avg".

    Text that could be taken for another key, or that has a slash, is quoted: the key "0" gives '"0"', the key 0 gives
    '0'. So no two places in a nesting have the same path.
    """
    return "/".join(map(_component, keys)) or _ROOT


def _component(key: object) -> str:
    if type(key) is str:
        bare = _BARE.fullmatch(key) and key not in _NOT_BARE and not _is_number(key)
        return key if bare else _quoted(key)
    if type(key) is tuple:
        return "(" + ",".join(map(_component, key)) + ")"
    if key is None or type(key) in (bool, float) or (type(key) is int and fits_64_bits(key)):
        return repr(key)
    if not is_key(key):
        return _quoted(f"<{type(key).__name__}>")
    return json.dumps(key_node(key), separators=(",", ":")).replace("/", "\\u002f")


def _quoted(text: str) -> str:
    """The text as JSON, without slashes; halves of surrogate pairs are escaped, whole characters are not."""
    quoted = json.dumps(text, ensure_ascii=False).replace("/", "\\u002f")
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in quoted)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
