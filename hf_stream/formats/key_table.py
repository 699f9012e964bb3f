"""Keys of dicts in pickles: of which kinds they may be, and the work that colliding ones would make, counted before.

The hash of a number, and of a tuple of numbers, is known to everybody. Keys with one hash, or keys that are led through
the same places of the table, make each insertion as slow as the dict is large. Text is hashed with a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import torch

from hf_stream.errors import FormatError
from hf_stream.formats.pickle_objects import Inert, InertClass

# Ordinary keys need two steps or so; fractions with a power of two below, and the like, up to a hundred.
_STEPS: Final = 256
_FEW_STEPS: Final = 5000  # a hundred keys of one hash
_SHIFT: Final = 5  # both as in CPython's dicts
_HASH: Final = 2**64 - 1

# A key is hashed by C code that follows it all the way down: nested deeply it would end the process.
_MAX_KEY_NESTING: Final = 16
_MAX_KEY_PARTS: Final = 100
# Bytes of memory that the work for each part counts as.
KEY_PART: Final = 32
# Larger ones are no keys of anything.
_KEY_NUMBERS: Final = range(-(2**63), 2**63)
PLAIN_KEYS: Final = frozenset({str, int, float, bool, bytes, type(None), torch.dtype, torch.device})
_KEYS: Final = PLAIN_KEYS | {Inert, InertClass}


class KeyTable:
    """A table of keys that is filled as CPython fills a dict.

    Args:
        target: The dict that is filled, with the keys that it has already. It is held, so that its id stays its own.
    """

    def __init__(self, target: Collection[Any] = ()) -> None:
        self._target = target
        self._keys: list[Any] = []
        self._hashes: list[int] = []
        self._slots: list[int | None] = [None] * 8
        self._steps = 0
        for key in target:
            self.add(key)

    def add(self, key: Any) -> None:
        """Count the steps for a key; before the dict gets it.

        Raises:
            FormatError: The keys so far take far more steps than keys do.
        """
        hashed, number = hash(key), len(self._keys)
        slot = self._find(key, hashed)
        if self._slots[slot] is None:
            self._keys.append(key)
            self._hashes.append(hashed)
            self._slots[slot] = number
            if 3 * (number + 2) > 2 * len(self._slots):
                self._grow()
        if self._steps > _FEW_STEPS + _STEPS * number:
            raise FormatError(
                f"{number} keys of one dict are chosen so that their hashes collide, which makes a dict slow; "
                "no checkpoint has such keys: do not use the file"
            )

    def _find(self, key: Any, hashed: int) -> int:
        """The slot that has the key, or that is free for it."""
        slots, mask, rest = self._slots, len(self._slots) - 1, hashed & _HASH
        at = rest & mask
        while (number := slots[at]) is not None and not (self._hashes[number] == hashed and self._keys[number] == key):
            rest >>= _SHIFT
            at = (at * 5 + rest + 1) & mask
            self._steps += 1
        return at

    def _grow(self) -> None:
        self._slots = [None] * (2 * len(self._slots))
        for number, (key, hashed) in enumerate(zip(self._keys, self._hashes, strict=True)):
            self._slots[self._find(key, hashed)] = number


def check_collisions(keys: Iterable[Any]) -> None:
    """Refuse keys that would make a dict or a set slow.

    Raises:
        FormatError: They would.
    """
    keys = list(keys)
    if any(type(key) is not str for key in keys):
        KeyTable(keys)


def check_key(key: Any, spend: Callable[[int], None]) -> None:
    """Refuse a key of a dict, or an element of a set, that is more than a plain value or a small tuple of these.

    An object that was not made is as good as a plain value: it has the hash of its place in memory.

    Args:
        key: The key. A few bytes of a pickle can use a large one once more.
        spend: Counts the work, as bytes of memory.

    Raises:
        FormatError: It is.
    """
    todo, parts = [(key, 0)], 0
    while todo:
        item, depth = todo.pop()
        parts += 1
        if type(item) in (tuple, torch.Size) and depth < _MAX_KEY_NESTING and parts + len(item) < _MAX_KEY_PARTS:
            todo.extend((part, depth + 1) for part in item)
        elif type(item) not in _KEYS or (type(item) is int and item not in _KEY_NUMBERS):
            raise FormatError(f"a {type(item).__name__} is no key, or part of one, in a file of tensors")
    spend(KEY_PART * parts)


def inert_in_key(key: Any) -> Inert | InertClass | None:
    """The first part of a key that was not made or looked up."""
    if isinstance(key, Inert | InertClass):
        return key
    if type(key) is tuple:
        return next((found for part in key if (found := inert_in_key(part)) is not None), None)
    return None
