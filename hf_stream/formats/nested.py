"""The structure of a nested state as JSON: containers and plain values exactly, anything else as a tagged node.

    null, true, 3, 1.5, "text", [...]      themselves
    {"dict": {"lr": 0.1}}                  a dict whose keys are all text
    {"dict": [[0, "a"], [null, "b"]]}      a dict with other keys; likewise "OrderedDict" and "Counter"
    {"tuple": [...]}
    {"int": "0x1f..."}                     beyond 64 bits
    {"float": "nan"}                       or "inf", "-inf", or the 16 hex digits of any other NaN
    {"complex": [1.0, 2.0]}
    {"bytes": "aGk="}                      in base64; so is {"str": ...}, text with halves of surrogate pairs, in UTF-8
    {"tensor": "state/0/exp_avg"}          and all other tags: the caller's

An object that stands for a value has one name, its tag, so that no key of anybody's dict is taken for one.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeAlias

from hf_stream.errors import FormatError
from hf_stream.formats.key_table import check_collisions
from hf_stream.formats.nested_paths import Keys, path_of
from hf_stream.formats.nested_scalars import PARSERS, Json, is_key, is_plain, is_unicode, key_node, plain_node, shown
from hf_stream.formats.strict_json import Pairs

# Far below what the interpreter and its JSON parser can follow, in a caller's deep stack as well.
MAX_DEPTH: Final = 100
# What is in several places is written in each of them. Ordinary states share a few small values.
_MAX_COPIED: Final = 4 << 20
_ITEM: Final = 64
_SHORT: Final = 64

EncodeOther: TypeAlias = Callable[[object, Keys], dict[str, Json] | None]
DecodeOther: TypeAlias = Callable[[str, Json, Keys], object]

_DICTS: Final[dict[str, type[dict[Any, Any]]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_DICT_TAGS: Final = {kind: tag for tag, kind in _DICTS.items()}
_DAMAGED: Final = "The file is damaged, or not made by save_nested: get it again."


def encode_structure(state: object, other: EncodeOther) -> Json:
    """The nesting as a tree for `dump_structure`.

    Args:
        state: Any nesting of dicts, lists and tuples with plain values.
        other: Given a value of another type and the keys that lead to it, returns its node (with one tag, not one of
            those above), or None for what it does not know. It may change the node before the tree is dumped.

    Raises:
        FormatError: A value cannot be told exactly, a container holds itself, or the nesting is too deep.
    """
    try:
        return _Encoder(other).node(state)
    except RecursionError:
        raise FormatError(f"the state nests deeper than {MAX_DEPTH} levels. Make it flatter.") from None


def dump_structure(tree: Json) -> str:
    """A tree as text, without anything that is not Unicode."""
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def parse_json(text: str) -> Json:
    """The text's tree: objects are `Pairs`, and names repeated in them are kept.

    Raises:
        FormatError: It is not JSON, or too deep.
    """
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise FormatError(f"the structure nests deeper than {MAX_DEPTH} levels. {_DAMAGED}") from None
    except ValueError as error:
        raise FormatError(f"the structure is not JSON ({error!s:.80}). {_DAMAGED}") from None


def decode_structure(tree: Json, other: DecodeOther) -> object:
    """The nesting that a tree from `parse_json` tells.

    Args:
        tree: What `encode_structure` made, or what somebody else did.
        other: Given a tag, what is under it, and the keys that lead there, returns the value, or raises `FormatError`.

    Raises:
        FormatError: It tells no nesting.
    """
    try:
        return _Decoder(other).value(tree)
    except RecursionError:
        raise FormatError(f"the structure nests deeper than {MAX_DEPTH} levels. {_DAMAGED}") from None


def malformed(keys: Keys, fact: str) -> FormatError:
    """The error for a node at the place to which `keys` lead."""
    return FormatError(f"'{path_of(keys)}': {fact}. {_DAMAGED}")


class _Encoder:
    def __init__(self, other: EncodeOther) -> None:
        self._other = other
        self._keys: list[object] = []
        self._open: set[int] = set()  # containers around the value at hand
        self._met: set[int] = set()  # containers and long values; the state keeps them where they are
        self._copied = 0

    def node(self, value: object) -> Json:
        if is_plain(value):
            self._count_long(value)
            return plain_node(value)
        kind = type(value)
        if kind in (list, tuple) or kind in _DICT_TAGS:
            return self._container(value)
        node = self._other(value, self._keys)
        if node is None:
            raise FormatError(f"'{path_of(self._keys)}' {_refusal(value)}")
        return node

    def _container(self, value: Any) -> Json:
        if id(value) in self._open:
            raise FormatError(f"'{path_of(self._keys)}' holds itself. Break the cycle.")
        if len(self._open) == MAX_DEPTH:
            raise FormatError(f"'{path_of(self._keys)}' nests deeper than {MAX_DEPTH} levels. Make the state flatter.")
        self._count(value, _ITEM * (1 + len(value)))
        self._open.add(id(value))
        tag = _DICT_TAGS.get(type(value))
        node: Json
        if tag is not None:
            node = {tag: self._items(value)}
        else:
            items = [self._at(number, item) for number, item in enumerate(value)]
            node = {"tuple": items} if type(value) is tuple else items
        self._open.remove(id(value))
        return node

    def _items(self, value: dict[object, object]) -> Json:
        for key in value:
            self._count_long(key)
        if all(type(key) is str and is_unicode(key) for key in value):
            return {key: self._at(key, item) for key, item in value.items()}
        for key in value:
            if not is_key(key):
                raise FormatError(
                    f"'{path_of(self._keys)}': the key {shown(key)} is a {type(key).__name__}; keys can be text, "
                    "bytes, numbers but NaN, None, and tuples of these. Use such a key."
                )
        return [[key_node(key), self._at(key, item)] for key, item in value.items()]

    def _count_long(self, value: object) -> None:
        """Count text, bytes or a number that is not short."""
        if (type(value) is str or type(value) is bytes) and len(value) > _SHORT:
            self._count(value, len(value))
        elif type(value) is int and value.bit_length() > 8 * _SHORT:
            self._count(value, value.bit_length() // 4)

    def _count(self, value: object, nbytes: int) -> None:
        """Count what is written once more for each place that it is in."""
        if id(value) not in self._met:
            self._met.add(id(value))
            return
        self._copied += nbytes
        if self._copied > _MAX_COPIED:
            raise FormatError(
                f"'{path_of(self._keys)}' and others before it stand in several places, and would be written more than "
                f"{_MAX_COPIED} bytes of copies. Put what is shared into one place."
            )

    def _at(self, key: object, value: object) -> Json:
        self._keys.append(key)
        node = self.node(value)
        self._keys.pop()
        return node


class _Decoder:
    def __init__(self, other: DecodeOther) -> None:
        self._other = other
        self._keys: list[object] = []
        self._depth = 0

    def value(self, node: Json) -> object:
        if isinstance(node, list):
            return self._list(node)
        if not isinstance(node, Pairs):
            return node
        if len(node) != 1:
            raise malformed(self._keys, f"a node with {len(node)} names, of which there must be one")
        ((tag, content),) = node
        if tag == "tuple":
            if not isinstance(content, list):
                raise malformed(self._keys, "a tuple that is not a list")
            return tuple(self._list(content))
        if tag in _DICTS:
            return self._dict(_DICTS[tag], content)
        if tag in PARSERS:
            try:
                return PARSERS[tag](content)
            except (ValueError, TypeError, KeyError):
                raise malformed(self._keys, f"{shown(content)} is no {tag}") from None
        return self._other(tag, content, self._keys)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise malformed(self._keys, f"nests deeper than {MAX_DEPTH} levels")

    def _list(self, nodes: list[Json]) -> list[object]:
        self._enter()
        items = [self._at(number, node) for number, node in enumerate(nodes)]
        self._depth -= 1
        return items

    def _dict(self, kind: type[dict[Any, Any]], content: Json) -> dict[Any, Any]:
        self._enter()
        if isinstance(content, Pairs):
            pairs: list[tuple[object, Json]] = list(content)
        elif isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
            pairs = [(self._key(key), node) for key, node in content]
        else:
            raise malformed(self._keys, f"a {kind.__name__} that is neither an object nor a list of pairs")
        try:
            check_collisions(key for key, _ in pairs)
        except FormatError as error:
            raise malformed(self._keys, str(error)) from None
        found = kind()
        for key, node in pairs:
            if key in found:
                raise malformed(self._keys, f"the key {shown(key)} is repeated")
            found[key] = self._at(key, node)
        self._depth -= 1
        return found

    def _key(self, node: Json) -> object:
        try:
            key = _Decoder(_nothing_else).value(node)
        except FormatError:
            raise malformed(self._keys, f"{shown(node)} is no key") from None
        if not is_key(key):
            raise malformed(self._keys, f"{shown(node)} is no key")
        return key

    def _at(self, key: object, node: Json) -> object:
        self._keys.append(key)
        value = self.value(node)
        self._keys.pop()
        return value


def _nothing_else(tag: str, content: Json, keys: Keys) -> NoReturn:
    del content
    raise malformed(keys, f"{shown(tag)} in a key")


def _refusal(value: object) -> str:
    kind = type(value)
    base = next((b for b in (dict, list, tuple, str, int, float, bytes) if isinstance(value, b)), None)
    if base is not None:
        plain = base.__name__
        return f"is a {kind.__name__}, of which only the {plain} would come back. Pass {plain}(...) of it."
    return (
        f"is a {kind.__module__}.{kind.__qualname__}. A nested state holds tensors, numpy arrays, dicts, lists, tuples "
        "and plain values: convert it to these, or leave it out."
    )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text:.40}")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_JSON: Final = json.JSONDecoder(object_pairs_hook=Pairs, parse_float=_finite, parse_constant=_constant)
