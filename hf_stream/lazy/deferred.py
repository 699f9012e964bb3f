"""Run deferred operations: each once, its inputs read when its turn comes, its outputs freed after their last use.

Operations see inputs laid out as they would be in eager PyTorch: several kernels (sums above all) add up in another
order, and give other last bits, where strides differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE, execute
from hf_stream.copying.geometry import contiguous_stride
from hf_stream.copying.plan import Copy
from hf_stream.copying.region import Region
from hf_stream.errors import LazyTensorError
from hf_stream.lazy.lower import Pending, lower
from hf_stream.lazy.recording import is_recording, recording
from hf_stream.lazy.sources import Buffer, Compute, Leaf, Output
from hf_stream.lazy.tensor import LazyTensor
from hf_stream.storage.memory import MemoryStorage, trim_heap

# Freed bytes that are worth a call of the allocator.
_TRIMMED = 16 << 20
# A storage for regions that are planned and never run.
NOWHERE = MemoryStorage(torch.empty(0, device="cpu"))


class Step(NamedTuple):
    """One step of running deferred operations.

    take: `dep`'s outputs go into the inputs of `compute`; run: `compute` runs, its inputs are freed; give: its outputs
    go into the results; free: nothing needs its outputs any more.
    """

    kind: Literal["take", "run", "give", "free"]
    compute: Compute
    dep: Compute | None = None


def steps(wanted: Iterable[Compute]) -> Iterator[Step]:
    """The steps that run the `wanted` operations, and those they depend on, each once. Reads nothing."""
    wanted = list(dict.fromkeys(wanted))
    needs = _dependencies(wanted)
    users = Counter(wanted)
    for deps in needs.values():
        users.update(deps)
    done: set[Compute] = set()

    def used(compute: Compute) -> Iterator[Step]:
        users[compute] -= 1
        if not users[compute]:
            yield Step("free", compute)

    for root in wanted:
        # Depth first, so that few outputs wait; by hand, as chains of operations may be long.
        stack = [] if root in done else [(root, list(needs[root]))]
        while stack:
            compute, waiting = stack[-1]
            if not waiting:
                stack.pop()
                done.add(compute)
                yield Step("run", compute)
            elif waiting[0] in done:
                dep = waiting.pop(0)
                yield Step("take", compute, dep)
                yield from used(dep)
            else:
                stack.append((waiting[0], list(needs[waiting[0]])))
        yield Step("give", root)
        yield from used(root)


def _dependencies(wanted: Iterable[Compute]) -> dict[Compute, list[Compute]]:
    needs: dict[Compute, list[Compute]] = {}
    todo = list(wanted)
    while todo:
        compute = todo.pop()
        if compute not in needs:
            needs[compute] = list(dict.fromkeys(dep for lazy in compute.inputs for dep in computes_below(lazy)))
            todo.extend(needs[compute])
    return needs


def computes_below(lazy: LazyTensor) -> Iterator[Compute]:
    """The operations whose outputs the elements of `lazy` come from, one step down."""
    if isinstance(lazy._source, Output):
        yield lazy._source.compute
        return
    for entry in lower(lazy, Region.contiguous(NOWHERE, lazy.dtype, lazy.shape)):
        if isinstance(entry, Pending):
            yield entry.output.compute


def run_deferred(
    wanted: Iterable[Compute], buffer_size: int = DEFAULT_BUFFER_SIZE
) -> Iterator[tuple[Compute, Sequence[torch.Tensor]]]:
    """Run operations and what they depend on; give the outputs of those `wanted`, in turn.

    The caller drops its references to the outputs before it asks for the next ones, so that they are freed.
    """
    inputs: dict[Compute, _Inputs] = {}
    outputs: dict[Compute, Sequence[torch.Tensor]] = {}
    freed = 0
    for kind, compute, dep in steps(wanted):
        if kind == "take" and dep is not None:
            if compute not in inputs:
                inputs[compute] = _Inputs(compute, buffer_size)
            inputs[compute].take(dep, outputs[dep])
        elif kind == "run":
            ready = inputs.pop(compute, None) or _Inputs(compute, buffer_size)
            outputs[compute] = _as_promised(compute, ready.call())
            freed += ready.nbytes
            del ready
        elif kind == "give":
            yield compute, outputs[compute]
        else:
            freed += sum(output.nbytes for output in outputs.pop(compute))
            if freed >= _TRIMMED:
                trim_heap()
                freed = 0


def call_now(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` at once, with real tensors in place of lazies; gives whatever it gives."""
    compute = Compute(func, args, kwargs, lazies_in((args, dict(kwargs))))
    inputs = _Inputs(compute, DEFAULT_BUFFER_SIZE)
    deps = dict.fromkeys(dep for lazy in compute.inputs for dep in computes_below(lazy))
    for dep, outputs in run_deferred(deps):
        inputs.take(dep, outputs)
        del outputs
    return inputs.call()


def lazies_in(tree: Any) -> list[LazyTensor]:
    """The lazies in a nest of arguments, each once."""
    return list({id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, LazyTensor)}.values())


def as_they_are(tree: Any) -> Any:
    """A nest of arguments in which lazies stay what they are now, whatever is written into their memory later."""
    if not is_recording():
        return tree
    kept: dict[int, LazyTensor] = {}

    def keep(lazy: LazyTensor) -> LazyTensor:
        if not isinstance(lazy._held, Buffer):
            return lazy
        if id(lazy) not in kept:
            kept[id(lazy)] = LazyTensor(lazy._window, lazy._source, lazy.device)
        return kept[id(lazy)]

    return pytree.tree_map_only(LazyTensor, keep, tree)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run torch ops as they were recorded: what autograd and autocast do to an op is done already."""
    with torch.no_grad(), torch._C._DisableAutocast(), recording(False):
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Inputs:
    """The real tensors that stand in for the lazies among an operation's arguments, filled bit by bit."""

    def __init__(self, compute: Compute, buffer_size: int) -> None:
        self._compute = compute
        self._buffer_size = buffer_size
        self.nbytes = 0  # of the tensors made here
        self._real: dict[int, torch.Tensor] = {}
        self._copies: list[Copy] = []
        self._pending: dict[Compute, list[Pending]] = {}
        for lazy in compute.inputs:
            if isinstance(lazy._source, Output):
                continue  # `take` gives a view of the output itself
            real = in_memory(lazy)
            if real is None:
                real, elements, place = _buffer_for(lazy, lazy.device)
                self.nbytes += real.untyped_storage().nbytes()
                self._plan(elements, place)
            self._real[id(lazy)] = real

    def _plan(self, elements: LazyTensor, place: torch.Tensor) -> None:
        for entry in lower(elements, Region.of(place)):
            if isinstance(entry, Copy):
                self._copies.append(entry)
            else:
                self._pending.setdefault(entry.output.compute, []).append(entry)

    def take(self, dep: Compute, outputs: Sequence[torch.Tensor]) -> None:
        """Use the outputs of an operation that has run."""
        for lazy in self._compute.inputs:
            source = lazy._source
            if isinstance(source, Output) and source.compute is dep:
                base = Region.of(outputs[source.index])
                self._real[id(lazy)] = _view_of(base.storage, base.offset, lazy)
        copies = [entry.copy_from(outputs) for entry in self._pending.pop(dep, ())]
        execute(copies, buffer_size=self._buffer_size)

    def call(self) -> Any:
        """Read what is still to be read, and run the operation."""
        with plain_torch():
            execute(self._copies, buffer_size=self._buffer_size)
            args, kwargs = pytree.tree_map_only(
                LazyTensor, lambda lazy: self._real[id(lazy)], (self._compute.args, dict(self._compute.kwargs))
            )
            with _default_dtype(self._compute.default_dtype):
                return self._compute.func(*args, **kwargs)


def in_memory(lazy: LazyTensor) -> torch.Tensor | None:
    """A lazy view of a real tensor as a real view."""
    source = lazy._source
    if not isinstance(source, Leaf) or not isinstance(source.storage, MemoryStorage):
        return None
    if source.storage.device != lazy.device or source.base % lazy.itemsize:
        return None
    return _view_of(source.storage, source.base, lazy)


def _view_of(storage: Any, base: int, lazy: LazyTensor) -> torch.Tensor:
    """The window of `lazy` over the memory that begins `base` bytes into a storage."""
    offset = base + int(lazy.storage_offset()) * lazy.itemsize
    view: torch.Tensor = storage.window(offset, lazy.dtype, lazy.shape, lazy.stride())
    return view


def _buffer_for(lazy: LazyTensor, device: torch.device) -> tuple[torch.Tensor, LazyTensor, torch.Tensor]:
    """A tensor to stand for `lazy`, still to be filled: elements, and the part of the tensor where they go."""
    size, stride, dtype = tuple(lazy.shape), lazy.stride(), lazy.dtype
    roomy = roomy_strides(size, stride)
    if roomy is None:
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        flat = torch.empty(span, dtype=dtype, device=device)
        below = lazy._window.as_strided((span,), (1,))
        return flat.as_strided(size, stride), LazyTensor(below, lazy._source, lazy.device), flat
    real = torch.empty_strided(size, roomy, dtype=dtype, device=device)
    once = tuple(slice(0, 1 if step == 0 else n) for n, step in zip(size, roomy, strict=True))
    return real, LazyTensor(lazy._window[once], lazy._source, lazy.device), real[once]


def input_nbytes(compute: Compute) -> int:
    """Bytes that an operation's inputs take, without those that are there already."""
    return sum(
        _buffer_for(lazy, torch.device("meta"))[0].untyped_storage().nbytes()
        for lazy in compute.inputs
        if not isinstance(lazy._source, Output) and in_memory(lazy) is None
    )


def roomy_strides(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a small buffer on which ops take the same path as on a window with these strides.

    The order of the dims stays, repeats (stride 0) stay, and so do gaps, made narrow: at most an eighth of what lies
    between them, or one element. None if dims overlap: only the memory below looks like such a window.
    """
    if 0 in size:
        return contiguous_stride(size)
    roomy = [0] * len(size)
    span = 1
    for dim in sorted(range(len(size)), key=lambda dim: (stride[dim], -dim)):
        if size[dim] == 1 or stride[dim] == 0:
            roomy[dim] = stride[dim] if size[dim] != 1 else span
        elif stride[dim] < span:
            return None
        else:
            roomy[dim] = span if stride[dim] == span else min(stride[dim], span + max(1, span // 8))
            span += (size[dim] - 1) * roomy[dim]
    return tuple(roomy)


def _as_promised(compute: Compute, out: Any) -> list[torch.Tensor]:
    """The outputs of an operation, laid out as its meta outputs were."""
    tensors = [out] if isinstance(out, torch.Tensor) else list(out)
    outputs = []
    for tensor, meta in zip(tensors, compute.results, strict=True):
        if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
            raise LazyTensorError(
                f"{compute.func} gave {tensor.dtype} of shape {list(tensor.shape)}, "
                f"but {meta.dtype} of shape {list(meta.shape)} on meta tensors"
            )
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.stride() != meta.stride():
            tensor = torch.empty_strided(meta.size(), meta.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        outputs.append(tensor)
    return outputs
