"""Whether two models are one: every parameter and buffer, its class, place and bits, and what is tied to what."""

from __future__ import annotations

import torch
from programs import bits
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    assert type(ours) is type(plain)
    for kind in ("named_parameters", "named_buffers"):
        a = dict(getattr(ours, kind)(remove_duplicate=False))
        b = dict(getattr(plain, kind)(remove_duplicate=False))
        assert list(a) == list(b)
        for name, x in a.items():
            assert_same_tensor(name, x, b[name])
        ties = {frozenset(n for n in a if a[n] is x) for x in a.values()}
        assert ties == {frozenset(n for n in b if b[n] is y) for y in b.values()}


def assert_same_tensor(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Tensors of a quantizer's own class are compared by what they are made of."""
    assert type(x) is type(y), name
    assert (x.dtype, x.shape, x.device, x.requires_grad) == (y.dtype, y.shape, y.device, y.requires_grad), name
    if is_traceable_wrapper_subclass(x):
        (parts, context), (other_parts, other_context) = x.__tensor_flatten__(), y.__tensor_flatten__()
        assert (parts, context) == (other_parts, other_context), name
        for part in parts:
            assert_same_tensor(f"{name}.{part}", getattr(x, part), getattr(y, part))
    elif not x.is_meta:
        assert bits(x) == bits(y), name
