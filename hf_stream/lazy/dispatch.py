"""What each aten op does to lazies: rewrite a window, build tiles, defer, run at once, or refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_stream.errors import LazyTensorError
from hf_stream.lazy.sources import Compute, Leaf, Output, Part, Tiles
from hf_stream.lazy.tensor import LazyTensor

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
        return _run_now
    if func._can_decompose():
        # Composite ops (reshape, say) come here whole only in inference mode.
        return _decompose
    if func in _PHYSICAL_VIEWS:
        return _defer
    if func.is_view:
        return _view
    tags = set(func.tags)
    if tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}:
        # Random ops as well: the generator must be drawn from in program order.
        return _run_now
    if not all(isinstance(ret.type, (torch.TensorType, torch.ListType)) for ret in func._schema.returns):
        return _run_now
    return _defer


def _decompose(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func.decompose(*args, **kwargs)


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    lazy = args[0]
    if not isinstance(lazy, LazyTensor):
        return _defer(func, args, kwargs)
    out = func(lazy._window, *args[1:], **kwargs)
    source, device = lazy._source, lazy.device
    if isinstance(out, torch.Tensor):
        if out.dtype != lazy.dtype and not isinstance(source, Leaf):
            # Bits of a virtual buffer under another dtype: only real storage has bits to look at.
            return _defer(func, args, kwargs)
        return LazyTensor(out, source, device)
    return type(out)(LazyTensor(piece, source, device) for piece in out)


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


def _clone(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`clone` and `_to_copy`: one tile, in the memory order that torch would give the copy."""
    (lazy,) = args
    if not isinstance(lazy, LazyTensor):
        return _defer(func, args, kwargs)
    kwargs = dict(kwargs)
    device = torch.device(kwargs.pop("device", None) or lazy.device)
    kwargs.pop("pin_memory", None)
    if kwargs.get("layout") not in (None, torch.strided):
        return _run_now(func, args, {**kwargs, "device": device})
    window = lazy._window
    dtype = kwargs.get("dtype") or window.dtype
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    kept = memory_format == torch.preserve_format and window.is_contiguous()
    if kept or memory_format == torch.contiguous_format:
        out = torch.empty(window.shape, dtype=dtype, device="meta")
    else:
        # Torch's own rule for the strides of a copy; on meta tensors it costs 100 us.
        out = torch.empty_like(window, dtype=dtype, memory_format=memory_format)
    if device.type == "meta":
        return out
    return _tiled(out, lazy, device)


def _tiled(out: torch.Tensor, lazy: LazyTensor, device: torch.device) -> LazyTensor:
    """A LazyTensor with the sizes, strides and dtype of the meta tensor `out`, filled from `lazy`."""
    window = lazy._window
    if not out.is_contiguous():
        order = sorted(range(out.dim()), key=out.stride, reverse=True)
        if out.permute(order).is_contiguous():
            window = window.permute(order)
        else:
            out = torch.empty(out.shape, dtype=out.dtype, device="meta")
    if not window.dim():
        window = window.unsqueeze(0)  # tiles lie along a dim
    return LazyTensor(out, Tiles([Part(window, lazy._source)], 0, out.dtype), device)


def _cat(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`cat`: [a, n], [b, n] -> [a + b, n]. Shapes are worked out here: torch's meta version costs 100 us and more."""
    tensors, dim = _sequence_and_dim(args, kwargs)
    # Torch lets empty 1-D tensors pass whatever the other shapes are.
    parts = [tensor for tensor in tensors if tensor.dim() != 1 or tensor.numel()] or tensors[:1]
    shape = list(parts[0].shape)
    if not _side_by_side(parts, dim, shape):
        return _run_now(func, args, kwargs)
    dim %= len(shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _joined(tensors, [LazyTensor.from_tensor(part) for part in parts], dim, shape)


def _stack(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`stack`: e tensors [a, n] -> [e, a, n] (dim 0)."""
    tensors, dim = _sequence_and_dim(args, kwargs)
    shape = list(tensors[0].shape)
    if any(tensor.shape != tensors[0].shape for tensor in tensors) or not -len(shape) <= dim + 1 <= len(shape) + 1:
        return _run_now(func, args, kwargs)
    dim %= len(shape) + 1
    shape.insert(dim, len(tensors))
    parts: list[LazyTensor] = []
    for tensor in tensors:
        lazy = LazyTensor.from_tensor(tensor)
        parts.append(LazyTensor(lazy._window.unsqueeze(dim), lazy._source, lazy.device))
    return _joined(tensors, parts, dim, shape)


def _sequence_and_dim(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], int]:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return tensors, dim


def _side_by_side(parts: Sequence[torch.Tensor], dim: int, shape: Sequence[int]) -> bool:
    """Whether `cat` would take these; where not, torch itself is asked, for its own words."""
    if not -len(shape) <= dim < len(shape):
        return False
    dim %= len(shape)
    rest = [*shape[:dim], *shape[dim + 1 :]]
    return all(len(p.shape) == len(shape) and [*p.shape[:dim], *p.shape[dim + 1 :]] == rest for p in parts)


def _joined(tensors: Sequence[torch.Tensor], parts: Sequence[LazyTensor], dim: int, shape: Sequence[int]) -> LazyTensor:
    device = parts[0].device
    for part in parts:
        if part.device != device:
            raise LazyTensorError(
                f"cannot join tensors on '{device}' and '{part.device}'; move them to one device with .to() first"
            )
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    out = torch.empty(shape, dtype=dtype, device="meta")
    return LazyTensor(out, Tiles([Part(part._window, part._source) for part in parts], dim, dtype), device)


def _like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`zeros_like`, `new_empty`, ...: a real tensor, made from the metadata alone."""
    lazy = args[0]
    kwargs = {**kwargs, "device": kwargs.get("device") or lazy.device}
    return func(lazy._window, *args[1:], **kwargs)


def _defer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A compute node: sizes and dtypes from running the op on meta tensors; data only when a result is needed."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = kwargs.get("device") or next((tensor.device for tensor in tensors if tensor.dim()), tensors[0].device)
    meta_args, meta_kwargs = pytree.tree_map_only(torch.Tensor, _as_meta, (args, dict(kwargs)))
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = "meta"
    try:
        out = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError):
        # No meta version, or wrong arguments: then torch itself gives the result, or the error.
        return _run_now(func, args, kwargs)
    compute = Compute(func, args, kwargs)
    if isinstance(out, torch.Tensor):
        return _output(out, compute, None, device)
    if isinstance(out, (tuple, list)) and all(isinstance(piece, torch.Tensor) for piece in out):
        return type(out)(_output(piece, compute, index, device) for index, piece in enumerate(out))
    return _run_now(func, args, kwargs)


def _output(meta: torch.Tensor, compute: Compute, index: int | None, device: torch.device) -> LazyTensor:
    return LazyTensor(torch.empty(meta.size(), dtype=meta.dtype, device="meta"), Output(compute, index), device)


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._window if isinstance(tensor, LazyTensor) else tensor.to("meta")


def _run_now(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    real_args, real_kwargs = materialize_inputs((args, dict(kwargs)))
    return func(*real_args, **real_kwargs)


def materialize_inputs(tree: Any) -> Any:
    """The same nest of arguments with real tensors in place of lazies."""
    from hf_stream.lazy.run import materialize

    lazies = list({id(x): x for x in pytree.tree_leaves(tree) if isinstance(x, LazyTensor)}.values())
    real = dict(zip(map(id, lazies), materialize(lazies), strict=True))
    return pytree.tree_map_only(LazyTensor, lambda lazy: real[id(lazy)], tree)


def _write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """In-place and `out=` ops: lazies may be read from, never written to."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in func._schema.arguments:
        # Collectives do not annotate what they write.
        written = func.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write)
        leaves = pytree.tree_leaves(named.get(argument.name)) if written else []
        if any(isinstance(leaf, LazyTensor) for leaf in leaves):
            raise LazyTensorError(
                f"{func} would write into a LazyTensor, which has no memory; "
                "call .materialize() first, or use the op that returns a new tensor"
            )
    return _run_now(func, args, kwargs)


def _copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`real.copy_(lazy)`: streams straight into the destination."""
    destination, lazy = args[:2]
    if isinstance(destination, LazyTensor):
        return _write(func, args, kwargs)
    lazy.expand(destination.shape).materialize(out=destination)
    return destination


# Lazies keep no conj and neg bits: these views become copies.
_PHYSICAL_VIEWS = frozenset({aten._conj.default, aten._neg_view.default})

_SPECIAL: dict[Any, Handler] = {
    aten.clone.default: _clone,
    aten._to_copy.default: _clone,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.copy_.default: _copy,
    aten.as_strided.default: _as_strided,
    aten._unsafe_view.default: _view,
    aten.unsafe_split.Tensor: _view,
    aten.unsafe_split_with_sizes.default: _view,
    aten.unsafe_chunk.default: _view,
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
