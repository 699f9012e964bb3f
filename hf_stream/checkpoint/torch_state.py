"""Which part of what torch.save wrote is meant by "the tensors of the file": at the top, or at a key that was given.

Plain values beside these tensors are left out. What cannot be read there is refused, or left out if that is wanted; it
may lie anywhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hf_stream.checkpoint.torch_nesting import LOAD_ONCE, NO_VALUES, unreadable
from hf_stream.errors import CheckpointError, PickleError
from hf_stream.formats.key_table import inert_in_key
from hf_stream.formats.nested_paths import Way, keys_of, path_of, shown_path
from hf_stream.formats.pickle_objects import Inert
from hf_stream.formats.torch_pickle import Refused, StorageRecord, TensorRecord
from hf_stream.lazy import LazyTensor

logger = logging.getLogger(__name__)

Key = str | Sequence[object]
Place = tuple[Way | None, Any]

_LISTED: Final = 8
_SHOWN: Final = 200
_MAX_DEPTH: Final = 500  # what is deeper cannot be followed
_CONTAINERS: Final = (dict, list, tuple)
_TENSORS: Final = (TensorRecord, Refused, LazyTensor)
_RECORDS: Final = frozenset({TensorRecord, Refused, StorageRecord})
_FOLLOWED: Final = (*_CONTAINERS, Inert)


def named_tensors(state: Any, key: Key | None, name: str, *, skip_unreadable: bool = False) -> dict[str, Any]:
    """The tensors that stand directly in a dict (or a list) of the state, by their keys.

    Args:
        state: What the file holds, with LazyTensors, or with records in the place of tensors.
        key: Where the dict is: "model", "ema/model" or "ema.model", or the keys one by one; "" for the top. None is the
            top as well if tensors stand there alone, and else the one dict of tensors that there is.
        name: What errors call the file.
        skip_unreadable: Whether to leave out, with a warning, what stands in the dict and is neither a tensor with
            plain bytes nor a plain value.

    Raises:
        CheckpointError: There is nothing at the key, or no key was given and several dicts could be meant. Lists them.
        PickleError: What is there, or something in it, cannot be read.
    """
    if key is None:
        dicts, objects = _survey(state, name)
        if len(dicts) > 1:
            raise CheckpointError(
                f"'{name}' holds {len(dicts)} dicts or lists of tensors; pass key= (--key on the command line) to say "
                f"which: {_listed(dicts)}. For all of them, in their nesting, use open_nested, or convert with --nested"
            )
        found = dicts[0][1] if dicts else state
        if dicts and (lost := _object_of_tensors(objects)):
            logger.warning("'%s': %s, which was to be made of tensors; these are left out", name, lost)
    else:
        found = _at(state, key)
        if found is _NOTHING:
            dicts, _ = _survey(state, name)
            raise CheckpointError(f"'{name}' has nothing at the key {key!r}; tensors are at {_listed(dicts) or 'none'}")
    where = f"'{name}'" if key is None else f"'{name}' at the key {key!r}"
    if type(found) in NO_VALUES:
        raise PickleError(f"{where} is {unreadable(found)}. {LOAD_ONCE}")
    tensors = _direct(found)
    if not tensors and not (isinstance(found, _CONTAINERS) and not found):
        dicts, objects = _survey(state, name)
        lost = None if dicts else _object_of_tensors(objects)
        others = [_fact(at, item) for at, item in _items(found) if _is_unreadable(at, item)]
        if others and not dicts and not lost:
            raise PickleError(f"{where} is no dict of tensors: {others[0]}. {LOAD_ONCE}")
        more = f", but {lost}, which was to be made of some. {LOAD_ONCE}" if lost else ""
        raise CheckpointError(f"{where} is no dict of tensors; these are at {_listed(dicts) or 'no key at all'}{more}")
    left_out = [(at, item) for at, item in _items(found) if _is_unreadable(at, item)]
    if left_out:
        facts = [_fact(at, item) for at, item in left_out[:_LISTED]]
        more = ", ..." if len(left_out) > _LISTED else ""
        if not skip_unreadable:
            raise PickleError(
                f"{where}: {facts[0]}. Pass skip_unreadable (--skip-unreadable on the command line) to leave such "
                f"values out. {LOAD_ONCE}"
            )
        logger.warning("%s: %d values are left out: %s", where, len(left_out), "; ".join(facts) + more)
        tensors = [(at, item) for at, item in tensors if not _is_unreadable(at, item)]
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


def _is_unreadable(at: Any, item: Any) -> bool:
    """Whether an entry of the dict that was chosen is more than a plain value, and no tensor with a name."""
    return type(item) in NO_VALUES or (isinstance(item, _TENSORS) and inert_in_key(at) is not None)


def _fact(at: Any, item: Any) -> str:
    if type(item) in NO_VALUES:
        return f"'{shown_path((at,))}' is {unreadable(item)}"
    return f"the key of a tensor is {unreadable(inert_in_key(at))}"


def _object_of_tensors(objects: Iterable[Place]) -> str | None:
    """The first of the objects that was to be made of tensors, in words; what several were given is seen once."""
    seen = set()
    for way, found in objects:
        todo = [found]
        while todo:
            value = todo.pop()
            if type(value) in _RECORDS:
                return f"'{shown_path(keys_of(way))}' is {unreadable(found)}"
            if id(value) not in seen:
                seen.add(id(value))
                todo.extend(value.given if type(value) is Inert else (item for _, item in _items(value)))
    return None


def _direct(value: Any) -> list[tuple[Any, Any]]:
    """The tensors in a container, with their keys; a tensor by itself has none."""
    if isinstance(value, _TENSORS):
        return [(None, value)]
    return [(at, item) for at, item in _items(value) if isinstance(item, _TENSORS)]


def _survey(state: Any, name: str) -> tuple[list[Place], list[Place]]:
    """Every container with tensors in it, and every object that was not made; and how `_at` finds them."""
    dicts: list[Place] = []
    objects: list[Place] = []
    todo: list[tuple[Way | None, int, Any]] = [(None, 0, state)]
    seen = set()
    while todo:
        way, depth, value = todo.pop()
        if type(value) is Inert:
            objects.append((way, value))
        if id(value) in seen or not isinstance(value, _CONTAINERS):
            continue
        seen.add(id(value))
        if depth > _MAX_DEPTH:
            raise PickleError(f"'{name}' nests deeper than {_MAX_DEPTH} levels; load it with torch and make it flatter")
        if any(isinstance(item, _TENSORS) for _, item in _items(value)):
            dicts.append((way, value))
        inner = [(Way(way, at), depth + 1, item) for at, item in _items(value) if isinstance(item, _FOLLOWED)]
        todo.extend(reversed(inner))
    return dicts, objects


def _listed(dicts: Sequence[Place]) -> str:
    named = [f"'{_as_key(way)}' ({len(_direct(value))} tensors)" for way, value in dicts[:_LISTED]]
    more = [f"{len(dicts) - _LISTED} more"] if len(dicts) > _LISTED else []
    return ", ".join(named + more)


def _as_key(way: Way | None) -> str:
    """What may be given as the key; cut where it is long."""
    return f"{'/'.join(f'{key!s:.{_SHOWN}}' for key in keys_of(way)):.{_SHOWN}}"


def _at(state: Any, key: Key) -> Any:
    """What is at the key, or `_NOTHING`."""
    if not isinstance(key, str):
        return _follow(state, key)
    ways = [[key], key.split("/"), key.split(".")] if key else [[]]
    return next((found for way in ways if (found := _follow(state, way)) is not _NOTHING), _NOTHING)


def _follow(state: Any, keys: Sequence[object]) -> Any:
    for key in keys:
        if isinstance(state, Inert):
            return state
        # A key that is a number may be given as one, or as text.
        found = next((item for at, item in _items(state) if type(at) is type(key) and at == key), _NOTHING)
        if found is _NOTHING:
            found = next((item for at, item in _items(state) if type(at) is not str and str(at) == key), _NOTHING)
        if found is _NOTHING:
            return _NOTHING
        state = found
    return state
