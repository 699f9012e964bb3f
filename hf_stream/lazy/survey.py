"""What running lazies would read and hold, and a fingerprint of what they are, all without running them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch.utils import _pytree as pytree

from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.formats.collector import collector_paused
from hf_stream.lazy.lower import lower
from hf_stream.lazy.run import NOWHERE
from hf_stream.lazy.sources import Compute, Leaf, Source, Tiles
from hf_stream.lazy.tensor import LazyTensor
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage


def reads(tensors: Iterable[torch.Tensor]) -> Iterator[Region]:
    """Every region that materialising the tensors would read, the inputs of deferred operations included."""
    done: set[Compute] = set()
    with collector_paused():
        todo = [LazyTensor.from_tensor(tensor) for tensor in tensors]
        while todo:
            lazy = todo.pop()
            for entry in lower(lazy, Region.contiguous(NOWHERE, lazy.dtype, lazy.shape)):
                if isinstance(entry, Copy):
                    yield entry.src
                elif entry.output.compute not in done:
                    done.add(entry.output.compute)
                    todo.extend(_inputs(entry.output.compute))


def working_set(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the largest deferred operation holds while it runs: its inputs, and theirs, and its outputs."""
    sizes: dict[int, int] = {}

    def below(source: Source) -> int:
        if isinstance(source, Leaf):
            return 0
        if id(source) not in sizes:
            if isinstance(source, Tiles):
                sizes[id(source)] = max((below(part.source) for part in source.parts), default=0)
            else:
                inputs = _inputs(source.compute)
                held = sum(lazy.numel() * lazy.itemsize for lazy in inputs)
                sizes[id(source)] = held + max((below(lazy._source) for lazy in inputs), default=0)
        return sizes[id(source)]

    return max(
        (below(t._source) + (0 if _is_movement(t._source) else t.numel() * t.itemsize) for t in _lazies(tensors)),
        default=0,
    )


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the expressions and the identities of the files under them: equal for equal results."""
    digest = hashlib.sha256()
    seen: dict[object, int] = {}

    def put(*facts: object) -> None:
        digest.update(repr(facts).encode())

    def put_source(source: Source) -> None:
        key = id(source) if not isinstance(source, Leaf) else (id(source.storage), source.base)
        put(seen.setdefault(key, len(seen)))
        if seen[key] != len(seen) - 1:
            return
        if isinstance(source, Leaf):
            put("leaf", source.base, _identity(source.storage))
        elif isinstance(source, Tiles):
            put("tiles", source.dim, source.dtype)
            for part in source.parts:
                put(part.size, part.stride, part.offset, part.dtype)
                put_source(part.source)
        else:
            put("compute", source.index, str(source.compute.func))
            for leaf in pytree.tree_leaves((source.compute.args, dict(source.compute.kwargs))):
                put_tensor(LazyTensor.from_tensor(leaf)) if isinstance(leaf, torch.Tensor) else put(leaf)

    def put_tensor(lazy: LazyTensor) -> None:
        window = lazy._window
        put(tuple(window.shape), window.stride(), window.storage_offset(), window.dtype)
        put_source(lazy._source)

    for lazy in _lazies(tensors):
        put_tensor(lazy)
    return digest.hexdigest()


def _lazies(tensors: Iterable[torch.Tensor]) -> Iterator[LazyTensor]:
    return (LazyTensor.from_tensor(tensor) for tensor in tensors)


def _inputs(compute: Compute) -> list[LazyTensor]:
    leaves = pytree.tree_leaves((compute.args, dict(compute.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, LazyTensor)]


def _is_movement(source: Source) -> bool:
    if isinstance(source, Tiles):
        return all(_is_movement(part.source) for part in source.parts)
    return isinstance(source, Leaf)


def _identity(storage: Storage) -> object:
    if isinstance(storage, FileStorage):
        return storage.identity
    content = bytearray(storage.nbytes)
    storage.read_into(memoryview(content), 0)
    return hashlib.sha256(content).hexdigest()
