"""Which part of what torch.save wrote is meant by "the tensors of the file": at the top, or at a key that was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from hf_stream.errors import CheckpointError, FormatError
from hf_stream.formats.nested_paths import Way, keys_of, path_of
from hf_stream.formats.torch_pickle import Refused, TensorRecord
from hf_stream.lazy import LazyTensor

Key = str | Sequence[object]

_LISTED: Final = 8
_MAX_DEPTH: Final = 500  # what is deeper cannot be followed
_SHOWN: Final = 200
_CONTAINERS: Final = (dict, list, tuple)
_TENSORS: Final = (TensorRecord, Refused, LazyTensor)


def named_tensors(state: Any, key: Key | None, name: str) -> dict[str, Any]:
    """The tensors that stand directly in a dict (or a list) of the state, by their keys.

    Args:
        state: What the file holds, with LazyTensors, or with records in the place of tensors.
        key: Where the dict is: "model", "ema/model" or "ema.model", or the keys one by one; "" for the top. None is the
            top as well if tensors stand there alone, and else the one dict of tensors that there is.
        name: What errors call the file.

    Raises:
        CheckpointError: There is nothing at the key, or no key was given and several dicts could be meant. Lists them.
    """
    if key is None:
        dicts = list(_dicts_of_tensors(state, name))
        if len(dicts) > 1:
            raise CheckpointError(
                f"'{name}' holds {len(dicts)} dicts or lists of tensors; pass key= (--key on the command line) to say "
                f"which: {_listed(dicts)}. For all of them, in their nesting, use open_nested, or convert with --nested"
            )
        found = dicts[0][1] if dicts else state
    else:
        found = _at(state, key)
        if found is _NOTHING:
            dicts = list(_dicts_of_tensors(state, name))
            raise CheckpointError(f"'{name}' has nothing at the key {key!r}; tensors are at {_listed(dicts) or 'none'}")
    tensors = _direct(found)
    if not tensors and not (isinstance(found, _CONTAINERS) and not found):
        where = f"'{name}'" if key is None else f"'{name}' at the key {key!r}"
        dicts = list(_dicts_of_tensors(state, name))
        raise CheckpointError(f"{where} is no dict of tensors; these are at {_listed(dicts) or 'no key at all'}")
    named = {at if type(at) is str else path_of(() if at is None else (at,)): tensor for at, tensor in tensors}
    if len(named) < len(tensors):
        raise CheckpointError(f"'{name}' has two tensors of one name, with a number as the key and as text")
    return named


_NOTHING: Final = object()


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values of a container; nothing of all else."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _direct(value: Any) -> list[tuple[Any, Any]]:
    """The tensors in a container, with their keys; a tensor by itself has none."""
    if isinstance(value, _TENSORS):
        return [(None, value)]
    return [(at, item) for at, item in _items(value) if isinstance(item, _TENSORS)]


def _dicts_of_tensors(state: Any, name: str) -> Iterator[tuple[Way | None, Any]]:
    """Every container with tensors in it, and how `_at` finds it."""
    todo: list[tuple[Way | None, int, Any]] = [(None, 0, state)]
    seen = set()
    while todo:
        way, depth, value = todo.pop()
        if id(value) in seen or not isinstance(value, _CONTAINERS):
            continue
        seen.add(id(value))
        if depth > _MAX_DEPTH:
            raise FormatError(f"'{name}' nests deeper than {_MAX_DEPTH} levels; load it with torch and make it flatter")
        if any(isinstance(item, _TENSORS) for _, item in _items(value)):
            yield way, value
        inner = [(Way(way, at), depth + 1, item) for at, item in _items(value) if isinstance(item, _CONTAINERS)]
        todo.extend(reversed(inner))


def _listed(dicts: Sequence[tuple[Way | None, Any]]) -> str:
    paths = [("/".join(map(str, keys_of(way))), value) for way, value in dicts[:_LISTED]]
    named = [f"'{path:.{_SHOWN}}' ({len(_direct(value))} tensors)" for path, value in paths]
    more = [f"{len(dicts) - _LISTED} more"] if len(dicts) > _LISTED else []
    return ", ".join(named + more)


def _at(state: Any, key: Key) -> Any:
    """What is at the key, or `_NOTHING`."""
    if not isinstance(key, str):
        return _follow(state, key)
    ways = [[key], key.split("/"), key.split(".")] if key else [[]]
    return next((found for way in ways if (found := _follow(state, way)) is not _NOTHING), _NOTHING)


def _follow(state: Any, keys: Sequence[object]) -> Any:
    for key in keys:
        # A key that is a number may be given as one, or as text.
        found = next((item for at, item in _items(state) if type(at) is type(key) and at == key), _NOTHING)
        if found is _NOTHING:
            found = next((item for at, item in _items(state) if type(at) is not str and str(at) == key), _NOTHING)
        if found is _NOTHING:
            return _NOTHING
        state = found
    return state
