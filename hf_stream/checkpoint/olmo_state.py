"""Nested states in the safetensors files of OLMo, read without running their pickles."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch

from hf_stream.errors import FormatError
from hf_stream.formats.budget import Budget
from hf_stream.formats.key_table import KeyTable
from hf_stream.formats.nested_paths import path_of
from hf_stream.formats.olmo_names import parse_olmo_name
from hf_stream.formats.plain_pickle import read_plain
from hf_stream.lazy import LazyTensor

logger = logging.getLogger(__name__)

# What stands beside the tensors of an optimizer takes some kilobytes.
_MAX_VALUE: Final = 16 << 20
_MAX_VALUES: Final = 128 << 20
_LISTED: Final = 5


def olmo_tensors(tensors: Mapping[str, LazyTensor], file: str) -> dict[Any, Any]:
    """The nesting of dicts with all that is a tensor; what is a pickle is left out, and not read.

    Args:
        tensors: Those of the file, by the names they have there.
        file: What errors call it.

    Raises:
        FormatError: A name is none of OLMo's, or two names stand for one place.
    """
    nesting, budget = _Nesting(file), Budget(sum(map(len, tensors)))
    for name, lazy in tensors.items():
        try:
            keys, pickled = parse_olmo_name(name, budget)
        except FormatError as error:
            raise FormatError(f"'{file}': {error}") from None
        if not pickled:
            nesting.put(keys, lazy)
    return nesting.root


def olmo_state(tensors: Mapping[str, LazyTensor], file: str, *, skip_unreadable: bool = False) -> dict[Any, Any]:
    """The nesting of dicts that the file tells, with its values; these are read at once.

    Args:
        tensors: Those of the file, by the names they have there.
        file: What errors call it.
        skip_unreadable: Whether to leave out names and values that are more than plain ones, with a warning.

    Raises:
        FormatError: A name or a value is more than plain ones, or two names stand for one place.
    """
    nesting, budget = _Nesting(file), Budget(sum(map(len, tensors)))
    reader = _Reader(Budget(sum(lazy.numel() for lazy in tensors.values() if lazy.dtype == torch.uint8)))
    skipped: list[str] = []
    for name, lazy in tensors.items():
        try:
            keys, pickled = parse_olmo_name(name, budget)
            value = reader.value(keys, lazy) if pickled else lazy
        except FormatError as error:
            if not skip_unreadable:
                raise FormatError(
                    f"'{file}': {error}. Pass skip_unreadable (--skip-unreadable on the command line) to leave such "
                    "values out, or have OLMo save plain ones"
                ) from None
            skipped.append(str(error))
        else:
            nesting.put(keys, value)
    if skipped:
        logger.warning("'%s': %d values are left out: %s", file, len(skipped), "; ".join(skipped[:_LISTED]))
    return nesting.root


class _Reader:
    """Reads values, within a limit for each and one for all."""

    def __init__(self, budget: Budget) -> None:
        self._left = _MAX_VALUES
        self._budget = budget

    def value(self, keys: tuple[object, ...], lazy: LazyTensor) -> Any:
        try:
            return self._value(lazy)
        except FormatError as error:
            raise FormatError(f"'{path_of(keys)}': {error}") from None

    def _value(self, lazy: LazyTensor) -> Any:
        if lazy.dtype != torch.uint8 or lazy.dim() != 1:
            raise FormatError(f"a pickle is a row of bytes, not {lazy.dtype} of shape {list(lazy.shape)}")
        limit = min(_MAX_VALUE, self._left)
        if lazy.numel() > limit:
            raise FormatError(f"its pickle has {lazy.numel()} bytes, at most {limit} are read")
        self._left -= lazy.numel()
        return read_plain(lazy.materialize().numpy().tobytes(), self._budget)


class _Nesting:
    """Dicts in dicts, in the making.

    Attributes:
        root: The outermost.
    """

    def __init__(self, file: str) -> None:
        self.root: dict[Any, Any] = {}
        self._file = file
        self._folders = {id(self.root): _Folder()}

    def put(self, keys: tuple[object, ...], value: Any) -> None:
        """Add a value at the end of a path."""
        folder = self.root
        for number, key in enumerate(keys[:-1]):
            self._check_key(folder, keys, number)
            inner = folder.get(key, _NOTHING)
            if inner is _NOTHING:
                inner = folder[key] = {}
                self._folders[id(inner)] = _Folder()
            elif id(inner) not in self._folders:
                raise self._taken(keys[: number + 1])
            folder = inner
        self._check_key(folder, keys, len(keys) - 1)
        if keys[-1] in folder:
            raise self._taken(keys)
        folder[keys[-1]] = value

    def _check_key(self, folder: dict[Any, Any], keys: tuple[object, ...], number: int) -> None:
        key, known = keys[number], self._folders[id(folder)]
        if type(key) is str and known.table is None:
            return
        if key not in folder:
            try:
                known.table = known.table or KeyTable(folder)
                known.table.add(key)
            except FormatError as error:
                raise FormatError(f"'{self._file}': {error}") from None
        spelling = path_of([key])
        other = known.spelled.setdefault(key, spelling)
        if other != spelling:
            raise FormatError(
                f"'{self._file}': the key {spelling} of '{path_of(keys)}' equals another one there, {other}"
            )

    def _taken(self, keys: tuple[object, ...]) -> FormatError:
        return FormatError(f"'{self._file}': there are two values at '{path_of(keys)}'. Get the file again.")


class _Folder:
    """What is known of the keys of a dict that has others than text.

    Attributes:
        table: The keys, to count the work.
        spelled: What they look like: equal keys can be different values, 1, 1.0 and True. A dict holds one of them.
    """

    def __init__(self) -> None:
        self.table: KeyTable | None = None
        self.spelled: dict[Any, str] = {}


_NOTHING: Final = object()
