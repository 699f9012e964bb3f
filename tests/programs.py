"""Random programs of tensor ops, for property tests: each step is a function that real and lazy tensors both take."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import strategies as st

Step = Callable[[torch.Tensor], torch.Tensor]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def seeded(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Distinct-looking values of any dtype: random bytes, except where not every byte pattern is a value."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    if dtype.is_floating_point or dtype.is_complex:
        base = torch.complex64 if dtype.is_complex else torch.float32
        return (torch.randn(shape, generator=generator, dtype=base) * 8).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 4, max_side: int = 6) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0 if draw(st.booleans()) else 1, max_side), max_size=max_dims)))


def _factors(draw: st.DrawFn, numel: int) -> tuple[int, ...]:
    """A random shape of `numel` elements."""
    shape = []
    while numel > 1 and len(shape) < 4:
        factor = draw(st.sampled_from([d for d in range(1, numel + 1) if numel % d == 0]))
        shape.append(factor)
        numel //= factor
    return (*shape, numel)


@st.composite
def movements(draw: st.DrawFn, shape: tuple[int, ...]) -> Step:
    """One op that only moves elements and never gives one twice."""
    ndim = len(shape)
    kinds = ["reshape", "clone", "unsqueeze", "permute_copy_order", "detach"]
    if ndim:
        kinds += [
            "slice",
            "select",
            "permute",
            "transpose",
            "split",
            "unbind",
            "flatten",
            "strided_slice",
            "narrow",
        ] * 2
        kinds += ["unfold_apart", "diagonal", "squeeze", "unflatten", "movedim", "tensor_split", "copies", "mT"]
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, ndim - 1)) if ndim else 0
    side = shape[dim] if ndim else 1
    if kind == "reshape" and 0 not in shape:
        new = _factors(draw, math.prod(shape))
        return lambda x: x.reshape(new)
    if kind == "flatten" and 0 not in shape:
        return lambda x: x.flatten(dim)
    if kind in ("slice", "strided_slice"):
        start = draw(st.integers(0, side))
        stop = draw(st.integers(start, side))
        step = draw(st.integers(1, 3)) if kind == "strided_slice" else 1
        return lambda x: x[(slice(None),) * dim + (slice(start, stop, step),)]
    if kind == "narrow" and side:
        start = draw(st.integers(0, side - 1))
        length = draw(st.integers(0, side - start))
        return lambda x: x.narrow(dim, start, length)
    if kind == "select" and side:
        index = draw(st.integers(-side, side - 1))
        return lambda x: x.select(dim, index)
    if kind == "permute":
        order = draw(st.permutations(range(ndim)))
        return lambda x: x.permute(order)
    if kind == "transpose":
        other = draw(st.integers(0, ndim - 1))
        return lambda x: x.transpose(dim, other)
    if kind == "unsqueeze":
        place = draw(st.integers(0, ndim))
        return lambda x: x.unsqueeze(place)
    if kind == "squeeze":
        return draw(st.sampled_from([lambda x: x.squeeze(dim), lambda x: x.squeeze(), lambda x: x[None].squeeze((0,))]))
    if kind == "unflatten" and side:
        inner = draw(st.sampled_from([d for d in range(1, side + 1) if side % d == 0]))
        return lambda x: x.unflatten(dim, (-1, inner))
    if kind == "movedim":
        other = draw(st.integers(0, ndim - 1))
        return draw(st.sampled_from([lambda x: x.movedim(dim, other), lambda x: x.swapaxes(dim, other)]))
    if kind == "tensor_split":
        at = sorted(draw(st.lists(st.integers(0, side), min_size=1, max_size=2)))
        pick = draw(st.integers(0, len(at)))
        return lambda x: x.tensor_split(at, dim)[pick]
    if kind == "copies":
        copies = [
            lambda x: torch.transpose_copy(x, dim, 0),
            lambda x: torch.unsqueeze_copy(x, dim),
            lambda x: torch.slice_copy(x, dim, 1, None, 2),
        ]
        return draw(st.sampled_from(copies))
    if kind == "mT" and ndim >= 2:
        return lambda x: x.mT
    if kind == "split" and side:
        size = draw(st.integers(1, side))
        pick = draw(st.integers(0, (side - 1) // size))
        if draw(st.booleans()):
            return lambda x: x.split(size, dim)[pick]
        return lambda x: x.chunk(size, dim)[0]
    if kind == "unbind" and side:
        pick = draw(st.integers(0, side - 1))
        return lambda x: x.unbind(dim)[pick]
    if kind == "unfold_apart" and side:
        size = draw(st.integers(1, side))
        step = draw(st.integers(size, side))
        return lambda x: x.unfold(dim, size, step)
    if kind == "diagonal" and ndim >= 2:
        other = (dim + 1) % ndim
        offset = draw(st.integers(-1, 1))
        return lambda x: x.diagonal(offset, dim, other)
    if kind == "permute_copy_order" and ndim == 4:
        return lambda x: x.contiguous(memory_format=torch.channels_last)
    if kind == "clone":
        return lambda x: x.clone()
    return lambda x: x.detach()


@st.composite
def computations(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """One op that changes values, repeats them, or reads them under another dtype."""
    ndim = len(shape)
    kinds = ["cast", "cast", "expand", "repeat", "view_dtype", "conj", "overlap", "as_strided"]
    if dtype != torch.float8_e4m3fn:  # has few ops, some of them for some strides only
        kinds += ["add", "math", "broadcast", "flip", "sum", "where", "index", "sort", "mean"]
    kind = draw(st.sampled_from(kinds))
    if kind == "cast" and not dtype.is_complex:
        exact = [d for d in DTYPES if not d.is_complex and d != torch.float8_e4m3fn]
        new = draw(st.sampled_from(exact if dtype.is_floating_point else DTYPES[:8]))
        # Floats beyond an integer's range give what the platform gives: keep to where the value is defined.
        if new.is_floating_point or not dtype.is_floating_point:
            return lambda x: x.to(new)
    if kind == "expand":
        times = draw(st.integers(1, 3))
        return lambda x: x.unsqueeze(0).expand(times, *shape)
    if kind == "repeat" and ndim:
        return lambda x: x.repeat((2,) + (1,) * (ndim - 1))
    if kind == "add" and dtype in (torch.float32, torch.int64, torch.float64):
        return lambda x: x + 1
    if kind == "math":
        ops = [lambda x: -x, lambda x: x * 2, lambda x: x * 0.5, lambda x: x > 1, lambda x: x.abs(), lambda x: 1 - x]
        return draw(st.sampled_from(ops))
    if kind == "broadcast" and ndim and shape[0]:
        ops = [lambda x: x + x[:1], lambda x: x[0] * x, lambda x: x[:1].expand_as(x) - x, lambda x: x + x.flatten()[0]]
        return draw(st.sampled_from(ops))
    if kind == "overlap" and ndim and shape[-1] > 1:
        return lambda x: x.unfold(-1, 2, 1)
    if kind == "index" and ndim and shape[0]:
        rows = draw(st.lists(st.integers(-shape[0], shape[0] - 1), max_size=4))
        return lambda x: x[torch.tensor(rows, dtype=torch.int64)]
    if kind == "sort" and ndim:
        return draw(
            st.sampled_from([lambda x: x.sort(dim=-1, stable=True)[0], lambda x: x.sort(dim=0, stable=True)[1]])
        )
    if kind == "mean" and ndim:
        return draw(st.sampled_from([lambda x: x.mean(0), lambda x: x.sum(-1), lambda x: x.sum()]))
    if kind == "as_strided" and math.prod(shape) > 4:
        return lambda x: x.contiguous().clone().as_strided((2, 2), (2, 1), 1)
    if kind == "flip" and ndim:
        return lambda x: x.flip(0)
    if kind == "sum" and ndim and dtype in (torch.int64, torch.int32, torch.float32):
        return lambda x: x.sum(0)
    if kind == "view_dtype" and dtype == torch.float32:
        return lambda x: x.view(torch.int32)
    if kind == "view_dtype" and dtype == torch.int32 and ndim and shape[-1] % 2 == 0:
        return lambda x: x.contiguous().view(torch.int64)
    if kind == "where" and dtype == torch.float32:
        return lambda x: torch.where(x > 0, x, torch.zeros_like(x))
    if kind == "conj" and dtype.is_complex:
        return lambda x: x.conj()
    return lambda x: x.view_as(x)


@st.composite
def joins(draw: st.DrawFn, tensors: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """`cat` or `stack` of tensors that have been cut to one shape."""
    ndim = min(tensor.dim() for tensor in tensors)
    if ndim == 0:
        return lambda xs: torch.cat([x.reshape(-1) for x in xs])
    dim = draw(st.integers(0, ndim - 1))
    flat = [tensor.flatten(ndim - 1).shape for tensor in tensors]
    common = [min(shape[i] for shape in flat) for i in range(ndim)]
    stacking = draw(st.booleans())

    def cut(x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(ndim - 1)
        for i, side in enumerate(common):
            if stacking or i != dim:
                x = x.narrow(i, 0, side)
        return x

    if stacking:
        return lambda xs: torch.stack([cut(x) for x in xs], dim)
    return lambda xs: torch.cat([cut(x) for x in xs], dim)
