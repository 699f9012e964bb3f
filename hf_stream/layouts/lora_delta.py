"""What a LoRA adapter adds to one weight: the sums that PEFT forms on the CPU, in its order and its dtypes.

r rank, E experts, O outputs, I inputs. An update is a product of low rank that is worked out whole (how a matrix
product rounds may depend on its size) and added to the weight piece by piece, so that no more than the product and a
few megabytes are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from hf_stream.errors import LayoutError
from hf_stream.layouts.lora_adapter import Factors
from hf_stream.layouts.rule import shape_text

_PIECE = 1 << 22
"""Elements of a weight that are added at a time."""

_HALF = (torch.float16, torch.bfloat16)
_CONVOLUTIONS = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}


@dataclass(frozen=True)
class _Update:
    """`product * scaling`, rounded to each of `dtypes` in turn."""

    product: torch.Tensor
    scaling: float
    dtypes: tuple[torch.dtype, ...] = ()

    def __getitem__(self, rows: slice) -> torch.Tensor:
        update = self.product[rows] * self.scaling
        for dtype in self.dtypes:
            update = update.to(dtype)
        return update


def adapter_dtype(weight: torch.Tensor, autocast: bool) -> torch.dtype:
    """The dtype in which PEFT holds the adapter of a weight.

    Raises:
        LayoutError: The weight has no dtype in which updates can be added to it.
    """
    if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        raise LayoutError(f"{weight.dtype} cannot be merged into; dequantize the base first.")
    return torch.float32 if autocast and weight.dtype in _HALF else weight.dtype


def linear_turns(weight: torch.Tensor, factors: Factors) -> set[bool]:
    """Whether a linear layer's weight may be [O, I] (False) or [I, O] (True), as far as shapes tell."""
    out_in = (factors.b.shape[0], factors.a.shape[1])
    shape = tuple(weight.shape)
    return {turned for turned in (False, True) if shape == (out_in[::-1] if turned else out_in)}


def parameter_turns(weight: torch.Tensor, factors: Factors) -> set[bool]:
    """The same for a parameter that is a target in itself: [O, I], or [E, O, I] (False) or [E, I, O] (True)."""
    if factors.a.ndim != 2 or weight.ndim not in (2, 3) or factors.a.shape[0] % experts_of(weight):
        return set()
    out_in = (factors.b.shape[0], factors.a.shape[1])
    shape = tuple(weight.shape[-2:])
    # PEFT itself adds a single expert as if it was no expert.
    may_turn = experts_of(weight) > 1
    return {turned for turned in (False, True)[: 1 + may_turn] if shape == (out_in[::-1] if turned else out_in)}


def experts_of(weight: torch.Tensor) -> int:
    """How many experts a parameter holds."""
    return weight.shape[0] if weight.ndim == 3 else 1


def merge_linear(
    weight: torch.Tensor, factors: Factors, scaling: float, *, turned: bool, autocast: bool
) -> torch.Tensor:
    """[O, I] plus [O, r] [r, I]; `turned` when the weight is [I, O]."""
    update = _matrix_update(factors, scaling, adapter_dtype(weight, autocast))
    if turned:
        update = replace(update, product=update.product.T)
    if factors.magnitude is None:
        return _add(weight, update)
    delta = update[:]
    norm: torch.Tensor = torch.linalg.norm(_turn(weight, turned) + _turn(delta, turned), dim=1)
    factor = factors.magnitude.to(adapter_dtype(weight, autocast)) / norm
    return (_turn(factor.view(-1, 1), turned) * (weight + delta)).to(weight.dtype)


def merge_embedding(weight: torch.Tensor, factors: Factors, scaling: float, *, autocast: bool) -> torch.Tensor:
    """[entries, O] plus ([O, r] [r, entries])^T."""
    update = _matrix_update(factors, scaling, adapter_dtype(weight, autocast))
    update = replace(update, product=update.product.T)
    if factors.magnitude is None:
        return _add(weight, replace(update, dtypes=(*update.dtypes, weight.dtype)))
    delta = update[:]
    norm: torch.Tensor = torch.linalg.norm(weight.T + delta.T, dim=1)
    factor = factors.magnitude.to(adapter_dtype(weight, autocast)) / norm
    return (factor.view(1, -1) * (weight + delta)).to(weight.dtype)


def merge_convolution(weight: torch.Tensor, factors: Factors, scaling: float, *, autocast: bool) -> torch.Tensor:
    """[O, I, ...] plus the convolution of [r, I, ...] with [O, r, 1, ...].

    Raises:
        LayoutError: The convolution has groups, or shapes do not fit.
    """
    dtype = adapter_dtype(weight, autocast)
    a, b = (_full(factor.to(dtype)) for factor in (factors.a, factors.b))
    if b.shape[1] != a.shape[0]:
        raise LayoutError("a convolution with groups cannot be merged (nor by peft).")
    if a.ndim != weight.ndim or (b.shape[0], *a.shape[1:]) != tuple(weight.shape):
        raise _misfit(weight, factors)
    if weight.ndim == 4 and tuple(weight.shape[2:]) == (1, 1):
        product = (b.squeeze(3).squeeze(2) @ a.squeeze(3).squeeze(2)).unsqueeze(2).unsqueeze(3)
    else:
        product = _CONVOLUTIONS[weight.ndim](a.transpose(0, 1), b).transpose(0, 1)
    update = _Update(product, scaling, (dtype,) if dtype in _HALF else ())
    if factors.magnitude is None:
        return _add(weight, update)
    delta = update[:]
    norm: torch.Tensor = (weight + delta).norm(p=2, dim=tuple(range(1, weight.ndim)), keepdim=True).transpose(1, 0)
    factor = factors.magnitude.to(dtype) / norm
    return (factor.view(-1, *[1] * (weight.ndim - 1)) * (weight + delta)).to(weight.dtype)


def merge_parameter(
    weight: torch.Tensor, factors: Factors, scaling: float, *, turned: bool, autocast: bool
) -> torch.Tensor:
    """[O, I] plus [O, r] [r, I]; or [E, O, I] (`turned`: [E, I, O]) plus as many of these as there are experts."""
    dtype = adapter_dtype(weight, autocast)
    experts = experts_of(weight)
    if experts == 1:
        update = _matrix_update(factors, scaling, dtype)
        if weight.ndim == 3:
            update = replace(update, product=update.product.unsqueeze(0))
    else:
        a = factors.a.to(dtype).reshape(experts, -1, factors.a.shape[-1])
        b = factors.b.to(dtype).reshape(factors.b.shape[0], -1, experts)
        update = _Update(torch.einsum("ore,eri->eio" if turned else "ore,eri->eoi", b, a), scaling)
    return _add(weight, replace(update, dtypes=(*update.dtypes, weight.dtype)))


def merge_bias(
    bias: torch.Tensor, weight: torch.Tensor, update: torch.Tensor, scaling: float, *, autocast: bool
) -> torch.Tensor:
    """[O] plus [O]."""
    return (bias + update.to(adapter_dtype(weight, autocast)) * scaling).to(bias.dtype)


def _matrix_update(factors: Factors, scaling: float, dtype: torch.dtype) -> _Update:
    a, b = factors.a.to(dtype), factors.b.to(dtype)
    return _Update(_full(b) @ _full(a), scaling, (dtype,) if dtype in _HALF else ())


def _turn(matrix: torch.Tensor, turned: bool) -> torch.Tensor:
    return matrix.T if turned else matrix


def _full(factor: torch.Tensor) -> torch.Tensor:
    """PEFT multiplies halves as floats, and rounds the result."""
    return factor.float() if factor.dtype in _HALF else factor


def _add(weight: torch.Tensor, update: _Update) -> torch.Tensor:
    """`weight += update`, in pieces."""
    if tuple(update.product.shape) != tuple(weight.shape):
        raise LayoutError(
            f"shape {shape_text(weight)} does not fit an update of shape {shape_text(update.product)}; "
            "is it the base that the adapter was trained on?"
        )
    rows = max(1, _PIECE * weight.shape[0] // max(1, weight.numel()))
    starts = range(0, max(1, weight.shape[0]), rows)
    pieces = [(weight[start : start + rows] + update[start : start + rows]).to(weight.dtype) for start in starts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _misfit(weight: torch.Tensor, factors: Factors) -> LayoutError:
    return LayoutError(
        f"shape {shape_text(weight)} does not fit an update of {shape_text(factors.b)} by {shape_text(factors.a)}; "
        "is it the base that the adapter was trained on?"
    )
