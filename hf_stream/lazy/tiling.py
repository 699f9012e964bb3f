"""Ops that make tiles: `clone`, casts, device moves, `cat` and `stack`. Nothing is read.

Shapes are worked out here, as torch's meta versions of `cat`, `stack` and `_to_copy` cost 100 us and more a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_stream.copying.geometry import contiguous_stride
from hf_stream.errors import LazyTensorError
from hf_stream.lazy.deferred import call_now
from hf_stream.lazy.sources import Part, Tiles
from hf_stream.lazy.tensor import LazyTensor


def clone(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`clone` and `_to_copy`: one tile, in the memory order that torch would give the copy."""
    lazy: LazyTensor = args[0]
    if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
        return call_now(func, args, kwargs)
    window = lazy._window
    dtype = kwargs.get("dtype") or window.dtype
    device = torch.device(kwargs.get("device") or lazy.device)
    if str(device) == "cuda":
        # As torch has it: no tensor is on 'cuda' without a number, and to others on 'cuda:0' it would be elsewhere.
        device = torch.device("cuda", torch.cuda.current_device())
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    preserve = memory_format == torch.preserve_format
    if memory_format == torch.contiguous_format or (preserve and window.is_contiguous()):
        out = torch.empty(window.shape, dtype=dtype, device="meta")
    elif preserve and dense_order(window) is not None:
        out = torch.empty_strided(window.size(), window.stride(), dtype=dtype, device="meta")
    else:
        out = torch.empty_like(window, dtype=dtype, memory_format=memory_format)
    return out if device.type == "meta" else filled(out, lazy, device)


def filled(out: torch.Tensor, lazy: LazyTensor, device: torch.device) -> LazyTensor:
    """A LazyTensor with the sizes, strides and dtype of the meta tensor `out`, and the elements of `lazy`."""
    window = lazy._window
    if not out.is_contiguous():
        order = dense_order(out)
        if order is None:
            out = torch.empty(out.shape, dtype=out.dtype, device="meta")
        else:
            window = window.permute(order)
    if not window.dim():
        window = window.unsqueeze(0)  # tiles lie along a dim
    return LazyTensor(out, Tiles([Part(window, lazy._source)], 0, out.dtype), device)


def dense_order(tensor: torch.Tensor) -> list[int] | None:
    """The order of dims in which a tensor fills its memory row by row; None if it has gaps or repeats."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.size(dim)), reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def dense(meta: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the sizes and strides of `meta`, and memory of its own; row-major if `meta` has gaps."""
    if not meta.is_contiguous() and dense_order(meta) is None:
        return torch.empty(meta.size(), dtype=meta.dtype, device="meta")
    return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device="meta")


def cat(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`cat`: [a, n], [b, n] -> [a + b, n] (dim 0)."""
    tensors, dim = _sequence_and_dim(args, kwargs)
    # Torch lets empty 1-D tensors pass whatever the other shapes are.
    parts = [tensor for tensor in tensors if tensor.dim() != 1 or tensor.numel()] or tensors[:1]
    shape = list(parts[0].shape)
    if not _side_by_side(parts, dim, shape):
        return _left_to_torch(func, tensors, dim)
    dim %= len(shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _joined(func, tensors, [(lazy._window, lazy) for lazy in _as_lazies(parts)], dim, shape)


def stack(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`stack`: e tensors [a, n] -> [e, a, n] (dim 0)."""
    tensors, dim = _sequence_and_dim(args, kwargs)
    first = tensors[0].shape
    shape = list(first)
    if any(tensor.shape != first for tensor in tensors) or not -len(shape) - 1 <= dim <= len(shape):
        return _left_to_torch(func, tensors, dim)
    dim %= len(shape) + 1
    shape.insert(dim, len(tensors))
    return _joined(func, tensors, [(lazy._window.unsqueeze(dim), lazy) for lazy in _as_lazies(tensors)], dim, shape)


def _sequence_and_dim(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], int]:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return tensors, dim


def _as_lazies(tensors: Sequence[torch.Tensor]) -> list[LazyTensor]:
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise LazyTensorError(
                f"cannot join tensors on '{device}' and '{tensor.device}'; move them to one device with .to() first"
            )
    return [LazyTensor.from_tensor(tensor) for tensor in tensors]


def _side_by_side(parts: Sequence[torch.Tensor], dim: int, shape: Sequence[int]) -> bool:
    if not -len(shape) <= dim < len(shape):
        return False
    dim %= len(shape)
    before, after = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    return all(
        len(part.shape) == len(shape) and part.shape[:dim] == before and part.shape[dim + 1 :] == after
        for part in parts
    )


def _left_to_torch(func: Any, tensors: Sequence[torch.Tensor], dim: int) -> Any:
    """Mostly an error, in torch's own words: what it says depends on shapes alone."""
    shown = [torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape) for tensor in tensors]
    return func(shown, dim).to(tensors[0].device)


def _joined(
    func: Any,
    tensors: Sequence[torch.Tensor],
    parts: Sequence[tuple[torch.Tensor, LazyTensor]],
    dim: int,
    shape: Sequence[int],
) -> LazyTensor:
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    out = torch.empty(shape, dtype=dtype, device="meta")
    windows = [window for window, _ in parts]
    first = tensors[0]
    if first.dim() > 2 and first.stride() != contiguous_stride(first.shape):
        # Images may keep their channels last: torch knows when, and its meta version is slow but right.
        out = func([LazyTensor.from_tensor(tensor)._window for tensor in tensors], dim)
        order = dense_order(out)
        assert order is not None  # new memory has no gaps
        windows = [window.permute(order) for window in windows]
        dim = order.index(dim)
    tiles = Tiles([Part(window, lazy._source) for window, (_, lazy) in zip(windows, parts, strict=True)], dim, dtype)
    return LazyTensor(out, tiles, parts[0][1].device)
