"""Go through a nesting that is in memory: find its tensors, put others in their place, compare it with another."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from hf_stream.checkpoint.nested_sharing import place_tensors
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.errors import FormatError
from hf_stream.formats.nested import MAX_DEPTH
from hf_stream.formats.nested_paths import Keys, path_of
from hf_stream.lazy import materialize
from hf_stream.lazy.tensor import dressed

_CONTAINERS: Final = frozenset({dict, OrderedDict, Counter, list, tuple})
_MAX_LEAVES: Final = 10_000_000


def leaves(state: Any) -> Iterator[tuple[tuple[object, ...], Any]]:
    """Every value that is no container, and the keys that lead to it; what is shared comes as often as it is met.

    Raises:
        FormatError: The nesting is deeper than nested states are, or holds itself.
    """
    todo: list[tuple[tuple[object, ...], Any]] = [((), state)]
    met = 0
    while todo:
        keys, value = todo.pop()
        met += 1
        if type(value) not in _CONTAINERS:
            yield keys, value
        elif len(keys) == MAX_DEPTH or met > _MAX_LEAVES:
            raise FormatError(f"'{path_of(keys[:3])}' nests deeper than {MAX_DEPTH} levels, or without end")
        else:
            todo.extend(((*keys, key), item) for key, item in reversed(list(_items(value))))


def first_difference(a: Any, b: Any) -> str | None:
    """The place where two nestings differ, in words, or None.

    Tensors are compared by type and shape, other values exactly; containers only by the keys that lead to leaves.
    """
    try:
        there, here = dict(leaves(a)), dict(leaves(b))
    except FormatError as error:
        return str(error)
    for keys, value in there.items():
        if keys not in here:
            return f"'{path_of(keys)}' is missing"
        if not _alike(value, here[keys]):
            return f"'{path_of(keys)}' is another one"
    more = next((keys for keys in here if keys not in there), None)
    return None if more is None else f"'{path_of(more)}' is new"


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
    found = {id(tensor): (path_of(keys), tensor) for keys, tensor in _tensors_once(state)}
    named = list(found.values())
    places = place_tensors(named)
    bases = {name: tensor for (name, tensor), (base, _) in zip(named, places, strict=True) if name == base}
    real = materialize(bases, device=device, buffer_size=buffer_size, progress=progress, desc="Loading")
    loaded: dict[int, torch.Tensor] = {}
    for (name, lazy), (base, view) in zip(named, places, strict=True):
        tensor = real[base]
        if view is not None:
            tensor = tensor.detach().as_strided(view.size, view.stride, view.offset)
        if name != base:
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
    return value.items() if isinstance(value, dict) else enumerate(value)


def _tensors_once(state: Any) -> Iterator[tuple[Keys, torch.Tensor]]:
    todo: list[tuple[tuple[object, ...], Any]] = [((), state)]
    seen = set()
    while todo:
        keys, value = todo.pop()
        if isinstance(value, torch.Tensor):
            yield keys, value
        elif type(value) in _CONTAINERS and id(value) not in seen:
            seen.add(id(value))
            todo.extend(((*keys, key), item) for key, item in reversed(list(_items(value))))


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
