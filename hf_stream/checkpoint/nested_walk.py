"""Go through a nesting that is in memory: find its tensors, put others in their place, compare it with another."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from hf_stream.checkpoint.nested_sharing import find_bases
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.formats.nested import MAX_DEPTH
from hf_stream.formats.nested_paths import Keys, PathNames, Way, keys_of, path_of
from hf_stream.lazy import materialize
from hf_stream.lazy.tensor import dressed

_CONTAINERS: Final = frozenset({dict, OrderedDict, Counter, list, tuple})
_FOLLOWED: Final = (*_CONTAINERS, torch.Tensor)


def first_difference(a: Any, b: Any) -> str | None:
    """The place where two nestings differ, in words, or None.

    Tensors are compared by type and shape, other values exactly; of dicts neither the class nor the order counts.
    """
    todo: list[tuple[Way | None, int, Any, Any]] = [(None, 0, a, b)]
    same: set[tuple[int, int]] = set()
    while todo:
        way, depth, there, here = todo.pop()
        if depth > MAX_DEPTH:
            return f"'{path_of(keys_of(way)[:3])}' nests deeper than {MAX_DEPTH} levels, or without end"
        kind = _kind(there)
        if kind is not _kind(here) or (kind is None and not _alike(there, here)):
            return f"'{path_of(keys_of(way))}' is another one"
        if kind is None or (id(there), id(here)) in same:
            continue
        same.add((id(there), id(here)))
        theirs, ours = dict(_items(there)), dict(_items(here))
        for one, other, fact in ((theirs, ours, "is missing"), (ours, theirs, "is new")):
            for key, value in one.items():
                if key not in other:
                    return f"'{path_of(_first_leaf(Way(way, key), value))}' {fact}"
        todo.extend((Way(way, key), depth + 1, theirs[key], ours[key]) for key in reversed(theirs))
    return None


def _kind(value: Any) -> type | None:
    """Dict, list or tuple; None for a leaf."""
    if isinstance(value, dict):
        return dict
    return type(value) if type(value) in _CONTAINERS else None


def _first_leaf(way: Way, state: Any) -> Keys:
    """The keys that lead to a value that is no container, or an empty one; to the state itself if it holds none."""
    todo: list[tuple[Way, Any]] = [(way, state)]
    seen = set()
    while todo:
        inner, value = todo.pop()
        if _kind(value) is None or not value:
            return keys_of(inner)
        if id(value) not in seen:
            seen.add(id(value))
            todo.extend((Way(inner, key), item) for key, item in reversed([*_items(value)]))
    return keys_of(way)


def load_state(
    state: Any,
    device: torch.device | str | None = None,
    *,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> Any:
    """The nesting with real tensors in the place of lazy ones, which share memory as those share bytes.

    Lists and dicts are changed, not copied. Arguments as those of `load_nested`.
    """
    name_of = PathNames()
    found = {id(tensor): (name_of(keys_of(way)), tensor) for way, tensor in _tensors_once(state)}
    named = list(found.values())
    bases, places = find_bases(named)
    real = materialize(bases, device=device, buffer_size=buffer_size, progress=progress, desc="Loading")
    loaded: dict[int, torch.Tensor] = {}
    for (name, lazy), (base, view) in zip(named, places, strict=True):
        tensor = real[base]
        if view is not None:
            tensor = tensor.detach().as_strided(view.size, view.stride, view.offset)
        if name != base or view is not None:
            tensor = dressed(tensor.detach(), lazy)
        if lazy.requires_grad and not tensor.requires_grad:
            tensor.requires_grad_()
        loaded[id(lazy)] = tensor
    return _replaced(state, loaded, {})


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, torch.Tensor) or type(a) is not type(b):
        return False
    return bool(a == b or (a != a and b != b))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if type(value) in _CONTAINERS else ()


def _tensors_once(state: Any) -> Iterator[tuple[Way | None, torch.Tensor]]:
    todo: list[tuple[Way | None, Any]] = [(None, state)]
    seen = set()
    while todo:
        way, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield way, value
        else:
            inner = [(Way(way, key), item) for key, item in _items(value) if isinstance(item, _FOLLOWED)]
            todo.extend(reversed(inner))


def _replaced(value: Any, by_id: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return by_id[id(value)]
    if type(value) not in _CONTAINERS:
        return value
    if id(value) in done:
        return done[id(value)]
    if type(value) is tuple:
        # It cannot hold itself but through a list or a dict.
        done[id(value)] = made = tuple(_replaced(item, by_id, done) for item in value)
        return made
    done[id(value)] = value
    for key, item in _items(value):
        value[key] = _replaced(item, by_id, done)
    return value
