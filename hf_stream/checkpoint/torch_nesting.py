"""The whole nesting in a file of torch.save, with LazyTensors for its tensors."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from typing import Any, Final

import torch

from hf_stream.checkpoint.torch_file import TorchFile
from hf_stream.errors import PickleError
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.key_table import inert_in_key
from hf_stream.formats.nested_paths import shown_path
from hf_stream.formats.pickle_objects import Function, Inert, InertClass
from hf_stream.formats.pickle_reader import brief
from hf_stream.formats.torch_pickle import Refused, StorageKind, StorageRecord, TensorRecord
from hf_stream.lazy import LazyTensor

logger = logging.getLogger(__name__)

_PLAIN: Final = frozenset({type(None), bool, int, float, str})
_CONTAINERS: Final = frozenset({dict, OrderedDict, Counter, list, tuple})
NO_VALUES: Final = frozenset({Refused, StorageRecord, StorageKind, Function, Inert, InertClass})
_LEFT_OUT: Final = object()
_LISTED: Final = 5
_WAY_ROUND: Final = (
    "Pass skip_unreadable (--skip-unreadable on the command line) to leave such values out, or key= (--key) to take "
    "one dict of tensors. "
)
LOAD_ONCE: Final = (
    "Nothing was looked up or run; if you trust the file, load it once with torch.load(..., weights_only=False), and "
    "save tensors and plain values"
)


def open_torch_file(path: str | os.PathLike[str], *, verify: bool = False, skip_unreadable: bool = False) -> Any:
    """Open a file of torch.save; reads its zip directory and its pickle and nothing else.

    Args:
        path: A file of torch.save, also one from before torch 1.6, or a TorchScript archive.
        verify: Whether to read everything once and compare it with the file's checksums.
        skip_unreadable: As for `nesting_of`.

    Returns:
        What `torch.load(path, map_location="cpu", weights_only=True)` gives, with LazyTensors for the tensors: those
        that share a storage are views of one, parameters are parameters. For a TorchScript archive: its tensors by
        their attributes' names.

    Raises:
        FormatError: The file is damaged, or holds what has no plain bytes or is no data. Names the record or the place.
    """
    return nesting_of(TorchFile(path, verify=verify), skip_unreadable=skip_unreadable)


def nesting_of(file: TorchFile, *, skip_unreadable: bool = False) -> Any:
    """What was saved, with LazyTensors in the place of records; dicts and lists are those of the file's state, changed.

    Args:
        file: An open file.
        skip_unreadable: Whether to leave out, with a warning, what is neither a tensor with plain bytes nor a plain
            value. In lists and tuples None takes its place.

    Raises:
        FormatError: There is such a value, or it is all that there is.
    """
    nesting = _Nesting(file, skip_unreadable)
    try:
        with collector_paused():
            state = nesting.converted(file.state, ())
    except RecursionError:
        raise PickleError(f"'{file.name}' nests deeper than can be followed") from None
    if nesting.left_out:
        if state is _LEFT_OUT:
            raise PickleError(f"'{file.name}': {nesting.listed[0]}, and nothing else is in it. {LOAD_ONCE}")
        logger.warning(
            "'%s': %d values are left out (in lists and tuples, None takes their places): %s",
            file.name,
            nesting.left_out,
            "; ".join(nesting.listed) + (", ..." if nesting.left_out > len(nesting.listed) else ""),
        )
    return state


def unreadable(value: object) -> str:
    """What a value that is none is, in words."""
    if isinstance(value, Refused):
        return value.what
    if isinstance(value, StorageRecord):
        return "a storage without a tensor"
    if isinstance(value, Inert):
        return f"an object made by {brief(value)}"
    return (
        f"the function or class {brief(value)}" if isinstance(value, Function | InertClass) else "a class of storages"
    )


class _Nesting:
    """A nesting in the making.

    Attributes:
        left_out: How many values are.
        listed: The first of them, in words.
    """

    def __init__(self, file: TorchFile, skip_unreadable: bool) -> None:
        self.left_out = 0
        self.listed: list[str] = []
        self._file = file
        self._skip = skip_unreadable
        self._lazies: dict[TensorRecord, LazyTensor] = {}
        # What containers have become, by their ids. Replaced tuples must not go away: others would get their ids.
        self._done: dict[int, Any] = {}
        self._replaced: list[Any] = []

    def converted(self, value: Any, keys: tuple[object, ...]) -> Any:
        """The value with LazyTensors, or `_LEFT_OUT`."""
        kind = type(value)
        if kind is TensorRecord:
            return self._lazy(value, keys)
        if kind in NO_VALUES:
            return self._unreadable(keys, value)
        if kind is set:
            found = next(filter(None, map(inert_in_key, value)), None)
            return value if found is None else self._unreadable(keys, found, "has")
        if kind not in _CONTAINERS:
            return value
        done = self._done
        if id(value) in done:
            return done[id(value)]
        if not value and not hasattr(value, "__dict__"):
            return value
        if kind is tuple:
            # It cannot hold itself but through a list or a dict.
            parts = tuple(
                self._item(item, (*keys, at)) if type(item) not in _PLAIN else item for at, item in enumerate(value)
            )
            new = parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
            done[id(value)] = new
            if new is not value:
                self._replaced.append(value)
            return new
        done[id(value)] = value
        if kind is list:
            for at, item in enumerate(value):
                if type(item) not in _PLAIN:
                    value[at] = self._item(item, (*keys, at))
        else:
            self._convert_items(value, keys)
        if hasattr(value, "__dict__"):
            self._convert_items(value.__dict__, keys, prefix=".")
        return value

    def _item(self, value: Any, keys: tuple[object, ...]) -> Any:
        """That of a list or a tuple."""
        converted = self.converted(value, keys)
        return None if converted is _LEFT_OUT else converted

    def _convert_items(self, items: dict[Any, Any], keys: tuple[object, ...], prefix: str = "") -> None:
        gone = []
        for key, item in items.items():
            if type(key) not in _PLAIN and (found := inert_in_key(key)):
                converted = self._unreadable(keys, found, "has a key that is")
            elif type(item) not in _PLAIN:
                converted = self.converted(item, (*keys, prefix + key if prefix else key))
            else:
                continue
            if converted is _LEFT_OUT:
                gone.append(key)
            else:
                items[key] = converted
        for key in gone:
            del items[key]

    def _lazy(self, record: TensorRecord, keys: tuple[object, ...]) -> LazyTensor:
        """The tensor, as a parameter or with the attributes that it has; one object for one record."""
        lazy = self._lazies.get(record)
        if lazy is None:
            self._file.check_taken(keys, record)
            lazy = self._file.plain(record)
            if record.parameter:
                lazy = torch.nn.Parameter(lazy, record.requires_grad)  # type: ignore[assignment]
            elif record.requires_grad:
                lazy.requires_grad_()
            self._lazies[record] = lazy
            self._set_attributes(lazy, record.attributes, keys)
        return lazy

    def _set_attributes(self, lazy: LazyTensor, attributes: dict[str, Any], keys: tuple[object, ...]) -> None:
        for name in attributes:
            if hasattr(lazy, name) or name == "_is_param":
                raise PickleError(f"'{self._file.name}': a tensor has the attribute '{name}', which is not one to set")
        self._convert_items(attributes, keys, prefix=".")
        for name, value in attributes.items():
            setattr(lazy, name, value)

    def _unreadable(self, keys: tuple[object, ...], value: object, how: str = "is") -> object:
        """Refuse the value, or note that it is left out."""
        if self._skip and len(self.listed) == _LISTED:
            self.left_out += 1
            return _LEFT_OUT
        place = f"'{shown_path(keys)}'" if keys else "the file"
        fact = f"{place} {how} {unreadable(value)}"
        if not self._skip:
            way = _WAY_ROUND if keys or how != "is" else ""
            raise PickleError(f"'{self._file.name}': {fact}. {way}{LOAD_ONCE}")
        self.left_out += 1
        self.listed.append(fact)
        return _LEFT_OUT
