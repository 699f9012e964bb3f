"""What running lazies would read and hold, and a fingerprint of what they are, all without running them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch.utils import _pytree as pytree

from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.formats.collector import collector_paused
from hf_stream.lazy.deferred import NOWHERE, input_nbytes, steps
from hf_stream.lazy.lower import lower
from hf_stream.lazy.sources import Compute, Leaf, Source, Tiles
from hf_stream.lazy.tensor import LazyTensor
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage


def reads(tensors: Iterable[torch.Tensor]) -> list[Region]:
    """Every region that materialising the tensors would read, the inputs of deferred operations included."""
    done: set[Compute] = set()
    found: list[Region] = []
    with collector_paused():
        todo = [LazyTensor.from_tensor(tensor) for tensor in tensors]
        while todo:
            lazy = todo.pop()
            for entry in lower(lazy, Region.contiguous(NOWHERE, lazy.dtype, lazy.shape)):
                if isinstance(entry, Copy):
                    found.append(entry.src)
                elif entry.output.compute not in done:
                    done.add(entry.output.compute)
                    todo.extend(entry.output.compute.inputs)
    return found


def working_set(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that deferred operations hold at the worst moment: inputs and outputs, without what they use inside."""
    wanted: dict[Compute, None] = {}
    for tensor in tensors:
        lazy = LazyTensor.from_tensor(tensor)
        for entry in lower(lazy, Region.contiguous(NOWHERE, lazy.dtype, lazy.shape)):
            if not isinstance(entry, Copy):
                wanted[entry.output.compute] = None
    inputs: dict[Compute, int] = {}
    outputs: dict[Compute, int] = {}
    held = most = 0
    for kind, compute, _ in steps(wanted):
        if kind in ("take", "run") and compute not in inputs:
            inputs[compute] = input_nbytes(compute)
            held += inputs[compute]
        if kind == "run":
            outputs[compute] = sum(meta.numel() * meta.itemsize for meta in compute.results)
            held += outputs[compute]
            most = max(most, held)
            held -= inputs[compute]
        elif kind == "free":
            held -= outputs[compute]
        most = max(most, held)
    return most


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the expressions and of what lies under them: equal only for equal results.

    Files count by identity (device, inode, size and time of change), real tensors by content, which is read.
    """
    digest = hashlib.sha256()
    numbers: dict[object, int] = {}
    todo: list[Source | object] = []  # sources to describe, each once; their numbers are in the digest already

    def put(*facts: object) -> None:
        digest.update(repr(facts).encode())

    def put_source(source: Source) -> None:
        thing: object = source
        if isinstance(source, Leaf):
            put(source.base)
            thing = source.storage
        elif not isinstance(source, Tiles):
            put(source.index)
            thing = source.compute
        if thing not in numbers:
            numbers[thing] = len(numbers)
            todo.append(thing)
        put(numbers[thing])

    def put_tensor(tensor: torch.Tensor) -> None:
        lazy = LazyTensor.from_tensor(tensor)
        window = lazy._window
        put(tuple(window.shape), window.stride(), window.storage_offset(), window.dtype, str(lazy.device))
        put_source(lazy._source)

    for tensor in tensors:
        put_tensor(tensor)
        while todo:
            thing = todo.pop()
            if isinstance(thing, Tiles):
                put("tiles", thing.dim, thing.dtype, len(thing.parts))
                for part in thing.parts:
                    put(part.size, part.stride, part.offset, part.dtype)
                    put_source(part.source)
            elif isinstance(thing, Compute):
                leaves, structure = pytree.tree_flatten((thing.args, dict(thing.kwargs)))
                put("compute", str(thing.func), str(structure))
                for leaf in leaves:
                    put_tensor(leaf) if isinstance(leaf, torch.Tensor) else put(leaf)
            elif isinstance(thing, Storage):
                put("storage", _identity(thing))
    return digest.hexdigest()


def _identity(storage: Storage) -> object:
    if isinstance(storage, FileStorage):
        return storage.identity
    content = bytearray(storage.nbytes)
    storage.read_into(memoryview(content), 0)
    return hashlib.sha256(content).hexdigest()
