"""Memory that is made and written to while nothing runs yet: each write is recorded, and runs when it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_stream.lazy.deferred import as_they_are, call_now, lazies_in
from hf_stream.lazy.sources import Buffer, Compute, Leaf, Output, Tiles
from hf_stream.lazy.tensor import LazyTensor
from hf_stream.lazy.tiling import dense
from hf_stream.storage.memory import MemoryStorage

aten = torch.ops.aten

_FROM_SIZES = frozenset(
    ("arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace", "ones")
    + ("scalar_tensor", "tril_indices", "triu_indices", "zeros")
)
# Of one value everywhere, and so the same whatever the order in memory.
_UNIFORM = {
    "empty": aten.empty.memory_format,
    "full": aten.full.default,
    "ones": aten.ones.default,
    "zeros": aten.zeros.default,
}


def made(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LazyTensor | None:
    """What `torch.empty`, `torch.arange`, `zeros_like`, `new_full` and the like give, yet to be made.

    None for other operations, for other memory than plain one, and on the meta device.
    """
    name = func._opname
    kind = name.removeprefix("new_").removesuffix("_like").removesuffix("_strided")
    like = args[0] if args and isinstance(args[0], LazyTensor) and name != kind and kind in _UNIFORM else None
    if func.namespace != "aten" or func._schema.is_mutable or (like is None and name not in _FROM_SIZES):
        return None
    if lazies_in((args, dict(kwargs))) != ([] if like is None else [like]):
        return None  # a lazy as a bound of linspace, say
    device = torch.device(kwargs.get("device") or ("cpu" if like is None else like.device))
    if device.type == "meta" or kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        return None
    shown = args if like is None else (like._window, *args[1:])
    window = dense(func(*shown, **{**kwargs, "device": "meta"}))
    if like is None:
        compute = Compute(func, args, kwargs, (), (window,))
    else:
        flat = torch.empty(window.numel(), dtype=window.dtype, device="meta")
        values = args[-1:] if kind == "full" else ()
        compute = Compute(
            _UNIFORM[kind], ([window.numel()], *values), {"dtype": window.dtype, "device": device}, (), (flat,)
        )
    return fresh(LazyTensor(window, Output(compute, 0), device))


def fresh(lazy: LazyTensor) -> LazyTensor:
    """A result that nobody else sees as memory that may be written to; others, such as views, stay what they are."""
    held, window = lazy._held, lazy._window
    if isinstance(held, Output):
        numel = held.compute.results[held.index].numel()
    elif isinstance(held, Tiles):
        numel = torch.Size(held.shape).numel()
    else:
        return lazy
    if window.storage_offset() == 0 and window.numel() == numel:
        lazy._held = Buffer(held, numel, lazy.dtype, lazy.device)
    return lazy


def write(func: Any, written: Sequence[LazyTensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Record an operation that writes into buffers.

    Args:
        written: Those of its arguments that it writes into.

    Returns:
        Whether that can be recorded: it writes into one buffer only, and leaves its size alone.

    Raises:
        RuntimeError: Shapes or dtypes do not fit; in torch's own words.
    """
    buffer = written[0]._held
    if not isinstance(buffer, Buffer) or any(lazy._held is not buffer for lazy in written):
        return False
    if torch.Tag.inplace_view in func.tags or not _fits(func, written, args, kwargs):
        return False

    def argument(lazy: LazyTensor) -> Any:
        window = lazy._window
        if lazy._held is not buffer:
            return lazy
        return _View(window.dtype, tuple(window.shape), window.stride(), int(window.storage_offset()))

    whole = torch.empty(buffer.numel, dtype=buffer.dtype, device="meta")
    before = LazyTensor(whole, buffer.now, buffer.device)
    shown = pytree.tree_map_only(LazyTensor, argument, (tuple(args), dict(kwargs)))
    arguments = (before, *as_they_are(shown))
    if func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags:
        operation = Write(func, copies=buffer.shared)
        compute = Compute(operation, arguments, {}, lazies_in(arguments), (whole,))
        buffer.put(Output(compute, 0))
    else:
        # The generator must be drawn from in program order, and custom operations may do anything at any time.
        real = call_now(Write(func, copies=True), arguments, {})
        buffer.put(Leaf(MemoryStorage(real), 0), shared=True)
    return True


@dataclass(frozen=True)
class Write:
    """An operation on views of a flat piece of memory, which comes first and is the result.

    Attributes:
        copies: Whether the memory is somebody else's as well, so that a copy of it is written to.
    """

    func: Any
    copies: bool

    def __call__(self, memory: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        if self.copies:
            memory = memory.clone()
        args, kwargs = pytree.tree_map_only(_View, lambda view: view.of(memory), (args, kwargs))
        self.func(*args, **kwargs)
        return memory


@dataclass(frozen=True)
class _View:
    """Stands for a view of the memory that is written to; strides and offset in elements of `dtype`."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(self.dtype).as_strided(self.size, self.stride, self.offset)


def _fits(func: Any, written: Sequence[LazyTensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation runs on meta tensors, and leaves the sizes of what it writes into alone."""
    if func.namespace != "aten":
        return True
    stand_ins = {id(lazy): lazy._window.as_strided(lazy.shape, lazy.stride()) for lazy in written}

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in stand_ins:
            return stand_ins[id(tensor)]
        return tensor._window if isinstance(tensor, LazyTensor) else tensor.to("meta")

    args, kwargs = pytree.tree_map_only(torch.Tensor, meta, (tuple(args), dict(kwargs)))
    try:
        func(*args, **kwargs)
    except NotImplementedError:
        return True  # what does not fit, torch says when it runs
    return all(stand_ins[id(lazy)].shape == lazy.shape for lazy in written)
