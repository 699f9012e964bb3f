"""Readable names for the places in a nesting, no two alike."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from hf_stream.errors import FormatError
from hf_stream.formats.nested_scalars import fits_64_bits, is_key, key_node

Keys: TypeAlias = Sequence[object]

# Characters of all paths of a state: so many, and so many more for each tensor.
_MAX_PATHS: Final = 16 << 20
_PER_TENSOR: Final = 256

# Characters of a path, and of a key in it, that errors show.
_SHOWN: Final = 300
_SHOWN_KEY: Final = 100

_ROOT: Final = "value"
_BARE: Final = re.compile(r"[\w.+:@-]+")
# What other keys than text look like, and the names that files keep for themselves.
_NOT_BARE: Final = frozenset({"None", "True", "False", "__metadata__", "__structure__"})


class Way(NamedTuple):
    """A place in a nesting, to be kept while it is walked: a tuple of keys for each place would take far more."""

    above: Way | None
    key: object


def keys_of(way: Way | None) -> tuple[object, ...]:
    """The keys that lead to a place, from the root, which is None."""
    keys = []
    while way is not None:
        keys.append(way.key)
        way = way.above
    return tuple(reversed(keys))


class PathNames:
    """Names the places of the tensors of one state by their paths.

    A few long keys, one in the other, make every path long: there is a limit for all of them together.
    """

    def __init__(self) -> None:
        self._left = _MAX_PATHS

    def __call__(self, keys: Keys) -> str:
        """The path.

        Raises:
            FormatError: All paths so far are too long.
        """
        self._left += _PER_TENSOR
        length = sum(len(key) for key in keys if isinstance(key, str | bytes))
        path = path_of(keys) if length < self._left else None
        self._left -= length if path is None else len(path)
        if path is None or self._left < 0:
            raise FormatError(
                f"the paths of the tensors are longer than {_MAX_PATHS} characters in all and {_PER_TENSOR} for each, "
                "as their keys are long and lie in each other. Use shorter keys."
            )
        return path


def path_of(keys: Keys) -> str:
    """The name of the place to which the keys lead: ["state", 0, "exp_avg"] -> "state/0/exp_avg".

    Text that could be taken for another key, or that has a slash, is quoted: the key "0" gives '"0"', the key 0 gives
    '0'. So no two places in a nesting have the same path.
    """
    return "/".join(map(_component, keys)) or _ROOT


def shown_path(keys: Keys) -> str:
    """The path for people to read, cut where it is long: one long key may lie in itself many times over."""
    path = path_of([*map(_cut, keys)])
    return path if len(path) <= _SHOWN else f"{path[: _SHOWN // 2]}...{path[-_SHOWN // 2 :]}"


def _cut(key: object) -> object:
    if type(key) is str and len(key) > _SHOWN_KEY:
        return key[:_SHOWN_KEY] + "..."
    if type(key) is bytes:
        return key[:_SHOWN_KEY]
    return tuple(map(_cut, key)) if type(key) is tuple else key


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
