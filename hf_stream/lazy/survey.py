"""What running lazies would read and hold, and a fingerprint of what they are, all without running them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch.utils import _pytree as pytree

from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.formats.collector import collector_paused
from hf_stream.lazy.buffers import Write
from hf_stream.lazy.deferred import NOWHERE, input_nbytes, steps
from hf_stream.lazy.lower import lower
from hf_stream.lazy.recording import is_recording, say_once
from hf_stream.lazy.sources import Compute, Leaf, Output, Source, Tiles
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


def say_reading(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Warn, while a layout is only planned, if it reads files all the same."""
    if is_recording():
        nbytes = sum(region.nbytes for region in reads(tensors) if isinstance(region.storage, FileStorage))
        say_once(what, nbytes)


def working_set(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that deferred operations hold at the worst moment: inputs and outputs, without what they use inside."""
    wanted: dict[Compute, None] = {}
    for tensor in tensors:
        lazy = LazyTensor.from_tensor(tensor)
        for entry in lower(lazy, Region.contiguous(NOWHERE, lazy.dtype, lazy.shape)):
            if not isinstance(entry, Copy):
                wanted[entry.output.compute] = None
    inputs: dict[Compute, int] = {}
    outputs: dict[Compute, _Memory] = {}
    looks: dict[Compute, dict[Compute, _Memory]] = {}
    held = most = 0
    for kind, compute, dep in steps(wanted):
        if kind in ("take", "run") and compute not in inputs:
            inputs[compute] = input_nbytes(compute)
            held += inputs[compute]
        if kind == "take" and dep is not None and _looks_at(compute, dep):
            outputs[dep].users += 1
            looks.setdefault(compute, {})[dep] = outputs[dep]
        elif kind == "run":
            nbytes = sum(meta.numel() * meta.itemsize for meta in compute.results)
            if isinstance(compute.func, Write) and not compute.func.copies:
                # What comes first is the result: the memory of another operation, or a buffer filled for this one.
                before = compute.inputs[0]._source
                if isinstance(before, Output):
                    outputs[compute] = looks[compute][before.compute]
                else:
                    outputs[compute] = _Memory(nbytes)
                    inputs[compute] -= nbytes
            else:
                outputs[compute] = _Memory(nbytes)
                held += nbytes
            outputs[compute].users += 1
            most = max(most, held)
            held -= inputs[compute] + sum(memory.without_user() for memory in looks.pop(compute, {}).values())
        elif kind == "free":
            held -= outputs.pop(compute).without_user()
        most = max(most, held)
    return most


class _Memory:
    """Bytes of an operation's outputs, and who uses them: the results, and operations that look at them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.users = 0

    def without_user(self) -> int:
        """Bytes that are free once one more user is gone."""
        self.users -= 1
        return 0 if self.users else self.nbytes


def _looks_at(compute: Compute, dep: Compute) -> bool:
    """Whether an operation gets views of another's outputs, and no copies of some of their elements."""
    sources = (lazy._source for lazy in compute.inputs)
    return any(isinstance(source, Output) and source.compute is dep for source in sources)


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
