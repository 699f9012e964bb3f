"""Copying values between tensors in memory at the speed of the caches, on one thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_stream.copying.geometry import Dim, merge_dims, tiles
from hf_stream.copying.scratch import Scratch

# Below torch's grain size an op runs on the calling thread alone: several threads must not each wake torch's pool.
BOX_ELEMENTS = 32767


def copy_elements(src: torch.Tensor, dst: torch.Tensor, via: Sequence[torch.dtype], scratch: Scratch) -> None:
    """Copy `src` to `dst`, which has the same shape, through the dtypes `via`.

    Takes scratch memory for boxes of at most `BOX_ELEMENTS`: one per dtype of `via` and two of the target's dtype.
    """
    dims = merge_dims(src.shape, src.stride(), dst.stride())
    if src.device.type != "cpu" or dst.device.type != "cpu":
        _copy_box(src, dst, via, scratch)
        return
    if len(dims) == 1 and not via and dims[0].src == dims[0].dst == 1:
        # All boxes in one call: another thread can hold the interpreter meanwhile.
        sources, targets = (torch.split(side.as_strided([dims[0].size], [1]), BOX_ELEMENTS) for side in (src, dst))
        torch._foreach_copy_(targets, sources)
        return
    transposed = _is_transposed(dims)
    src_base, dst_base = src.storage_offset(), dst.storage_offset()
    mark = scratch.mark()
    for src_at, dst_at, whole in tiles(dims, BOX_ELEMENTS):
        box = [dim for dim in whole if dim.size > 1]
        size = [dim.size for dim in box]
        source = src.as_strided(size, [dim.src for dim in box], src_base + src_at)
        target = dst.as_strided(size, [dim.dst for dim in box], dst_base + dst_at)
        if transposed:
            _transpose_box(source, target, via, scratch)
        else:
            _copy_box(source, target, via, scratch)
        scratch.rewind(mark)


def _is_transposed(dims: Sequence[Dim]) -> bool:
    """Whether the dimension that runs fastest in the source is not the one that runs fastest in the target."""
    return len(dims) > 1 and dims[-1].src != 1 and any(dim.src == 1 for dim in dims)


def _copy_box(src: torch.Tensor, dst: torch.Tensor, via: Sequence[torch.dtype], scratch: Scratch) -> None:
    for dtype in via:
        src = scratch.take(dtype, src.shape).copy_(src) if src.device.type == "cpu" else src.to(dtype)
    dst.copy_(src)


def _transpose_box(src: torch.Tensor, dst: torch.Tensor, via: Sequence[torch.dtype], scratch: Scratch) -> None:
    """Gather rows of the source, turn them in the cache, scatter rows of the target.

    torch turns a contiguous matrix in blocks, several times faster than it walks a strided one.
    """
    order = sorted(range(src.dim()), key=lambda dim: src.stride(dim) or src.numel(), reverse=True)
    rows = scratch.take(dst.dtype, [src.shape[dim] for dim in order])
    _copy_box(src.permute(order), rows, via, scratch)
    back = [order.index(dim) for dim in range(src.dim())]
    turned = rows.permute(back)
    if dst.is_contiguous():
        dst.copy_(turned)
    else:
        dst.copy_(scratch.take(dst.dtype, dst.shape).copy_(turned))
