"""What each aten op does to lazies: rewrite a window, build tiles, defer, run at once, or refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_stream.errors import LazyTensorError
from hf_stream.lazy.buffers import write
from hf_stream.lazy.deferred import as_they_are, call_now, lazies_in
from hf_stream.lazy.lower import built
from hf_stream.lazy.recording import is_recording
from hf_stream.lazy.sources import Buffer, Compute, Output, Tiles
from hf_stream.lazy.survey import say_reading
from hf_stream.lazy.tensor import LazyTensor
from hf_stream.lazy.tiling import cat, clone, dense, stack

aten = torch.ops.aten

Handler = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` symbolically where that is possible."""
    if torch.is_inference_mode_enabled():
        # Views of our (normal) meta tensors cannot be made inside inference mode.
        with torch.inference_mode(False):
            return _handler(func)(func, args, kwargs)
    return _handler(func)(func, args, kwargs)


@cache
def _handler(func: Any) -> Handler:
    special = _SPECIAL.get(func)
    if special is not None:
        return special
    if func.namespace == "c10d" or func._schema.is_mutable:
        return _write
    if func.namespace != "aten":
        # A custom op may do anything, and at any time: it gets real tensors, now.
        return _now
    if func._can_decompose():
        # Composite ops (reshape, say) come here whole only in inference mode.
        return _decompose
    if func in _PHYSICAL_VIEWS:
        return _defer
    if func.is_view:
        return _view
    tags = set(func.tags)
    if torch.Tag.view_copy in tags and func._opname.endswith("_copy"):
        return _view_copy
    if tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}:
        # Random ops as well: the generator must be drawn from in program order.
        return _now
    if not all(isinstance(ret.type, (torch.TensorType, torch.ListType)) for ret in func._schema.returns):
        return _now
    return _defer


def _now(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation at once: its result, or when it happens, depends on more than sizes and dtypes."""
    say_reading(str(func), lazies_in((args, dict(kwargs))))
    return call_now(func, args, kwargs)


def _decompose(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func.decompose(*args, **kwargs)


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    lazy = args[0]
    out = func(lazy._window, *args[1:], **kwargs)
    source, device = lazy._held, lazy.device
    if isinstance(out, torch.Tensor):
        if out.dtype != lazy.dtype and isinstance(source, Buffer) and isinstance(source.now, Tiles):
            source.put(built(source.now))  # one piece of memory, which may be written to under both dtypes
        if out.dtype != lazy.dtype and isinstance(source, Tiles):
            # Bits of tiles under another dtype: there are none to look at before they are built.
            # Dense first, as the gaps of an input are made narrow, by steps that the other dtype may not divide.
            return _defer(func, (clone(aten.clone.default, (lazy,), {}), *args[1:]), kwargs)
        return LazyTensor(out, source, device)
    return type(out)(LazyTensor(piece, source, device) for piece in out)


def _view_copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`squeeze_copy` and the like: the view, as a row-major tensor of its own."""
    base = getattr(getattr(aten, func._opname.removesuffix("_copy")), func._overloadname)
    try:
        out = _handler(base)(base, args, kwargs)
    except RuntimeError:
        # A copy can take a shape that a view cannot.
        return _defer(func, args, kwargs)
    if isinstance(out, torch.Tensor):
        return clone(aten.clone.default, (out,), {"memory_format": torch.contiguous_format})
    return [clone(aten.clone.default, (piece,), {"memory_format": torch.contiguous_format}) for piece in out]


def _as_strided(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The one view op whose meta version lets a window reach beyond its storage."""
    out = _view(func, args, kwargs)
    window = out._window
    last = window.storage_offset() + sum((n - 1) * step for n, step in zip(window.shape, window.stride(), strict=True))
    if window.numel() and (last + 1) * window.itemsize > window.untyped_storage().nbytes():
        raise LazyTensorError(
            f"as_strided: element {last} is wanted, but the tensor under the view has "
            f"{window.untyped_storage().nbytes() // window.itemsize}"
        )
    return out


def _layer_norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """For 16-bit tensors the meta version promises other dtypes than the CPU kernel gives."""
    return (_now if args[0].dtype.itemsize == 2 else _defer)(func, args, kwargs)


def _like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`zeros_like`, `new_empty`, ...: a real tensor, made from the metadata alone."""
    lazy = args[0]
    kwargs = {**kwargs, "device": kwargs.get("device") or lazy.device}
    return func(lazy._window, *args[1:], **kwargs)


def _metadata(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Questions that metadata answers."""
    return func(*pytree.tree_map_only(LazyTensor, _as_meta, tuple(args)), **kwargs)


def _defer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A compute node: sizes and dtypes from running the op on meta tensors; data only when a result is needed."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.dim()} or {tensors[0].device}
    if len(devices) > 1:
        # Few ops take tensors on several devices: torch knows which.
        return _now(func, args, kwargs)
    device = torch.device(kwargs.get("device") or devices.pop())
    meta_args, meta_kwargs = pytree.tree_map_only(torch.Tensor, _as_meta, (args, dict(kwargs)))
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = "meta"
    try:
        out = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError):
        # No meta version, or wrong arguments: then torch itself gives the result, or the error.
        return _now(func, args, kwargs)
    pieces = [out] if isinstance(out, torch.Tensor) else out
    if not isinstance(pieces, (tuple, list)) or not all(_is_strided(piece) for piece in pieces):
        return _now(func, args, kwargs)
    results = [dense(piece) for piece in pieces]
    args, kwargs = as_they_are((args, dict(kwargs)))
    compute = Compute(func, args, kwargs, lazies_in((args, kwargs)), results)
    lazies = [LazyTensor(result, Output(compute, index), device) for index, result in enumerate(results)]
    return lazies[0] if isinstance(out, torch.Tensor) else type(out)(lazies)


def _is_strided(piece: Any) -> bool:
    return isinstance(piece, torch.Tensor) and piece.layout == torch.strided


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._window if isinstance(tensor, LazyTensor) else tensor.to("meta")


def _write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """In-place and `out=` ops: lazies may be read from, and written to only where that is recorded."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    written: list[LazyTensor] = []
    for argument in func._schema.arguments:
        # Collectives do not annotate what they write.
        if func.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write):
            written += lazies_in(named.get(argument.name))
    if not written:
        return _now(func, args, kwargs)
    if is_recording() and func.namespace != "c10d" and write(func, written, args, kwargs):
        return written[0] if func._schema.returns else None
    raise LazyTensorError(
        f"{func} would write into a LazyTensor, which has no memory; "
        "call .materialize() first, or use the op that returns a new tensor"
    )


def _copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`real.copy_(lazy)`: streams straight into the destination."""
    destination, lazy = args[:2]
    if isinstance(destination, LazyTensor):
        return _write(func, args, kwargs)
    if destination.device.type != "meta":
        lazy.expand(destination.shape).materialize(out=destination)
    return destination


def _foreach_copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    del func
    for destination, lazy in zip(*args[:2], strict=True):
        destination.copy_(lazy, **kwargs)


# Lazies keep no conj and neg bits: these views become copies.
_PHYSICAL_VIEWS = frozenset({aten._conj.default, aten._neg_view.default})

_SPECIAL: dict[Any, Handler] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.clone.default: clone,
    aten._to_copy.default: clone,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.copy_.default: _copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten.as_strided.default: _as_strided,
    aten._unsafe_view.default: _view,
    aten.unsafe_split.Tensor: _view,
    aten.unsafe_split_with_sizes.default: _view,
    aten.index.Tensor: _defer,  # of its indices, only masks make the shape depend on data; meta refuses those
    aten.is_pinned.default: _metadata,
    aten.is_same_size.default: _metadata,
    aten._pin_memory.default: _now,
    aten.block_diag.default: _now,  # its meta version promotes dtypes wrongly
    **dict.fromkeys(
        (
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.empty_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
            aten.randint_like.default,
            aten.randint_like.low_dtype,
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
        ),
        _like,
    ),
}
