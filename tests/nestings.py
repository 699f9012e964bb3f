"""Nestings to save and load, and what it means for two of them to be the same."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from samples import DTYPES, random_bits, same_bits

floats = st.one_of(
    st.floats(),
    st.sampled_from([-0.0, math.nan, -math.nan, math.inf, 5e-324]),
    st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack(">d", bits)[0]),
)
ints = st.one_of(st.integers(), st.integers(-(2**200), 2**200), st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63)]))
# Halves of surrogate pairs included, and what could be taken for something else.
texts = st.one_of(
    st.text(st.characters(codec=None), max_size=8),
    st.sampled_from(["0", "None", "True", "1.5", "nan", "a/b", '"a"', "(a)", "__metadata__", "dict", "tensor", ""]),
    st.sampled_from(["\ud83d\ude00", "\U0001f600", "a\\u002fb", "0x10", "1j", "value"]),
)
plain = st.one_of(st.none(), st.booleans(), ints, floats, st.complex_numbers(), texts, st.binary(max_size=8))
keys = st.recursive(
    st.one_of(texts, st.none(), st.booleans(), ints, floats.filter(lambda x: x == x), st.binary(max_size=4)),
    lambda items: st.lists(items, max_size=3).map(tuple),
    max_leaves=4,
)


def containers(leaves: st.SearchStrategy[Any], max_leaves: int = 12) -> st.SearchStrategy[Any]:
    """Nestings of all kinds of containers, empty ones too."""
    return st.recursive(
        leaves,
        lambda items: st.one_of(
            st.lists(items, max_size=4),
            st.lists(items, max_size=4).map(tuple),
            st.dictionaries(keys, items, max_size=4),
            st.dictionaries(texts, items, max_size=4),
            st.lists(st.tuples(keys, items), max_size=4).map(OrderedDict),
            st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        ),
        max_leaves=max_leaves,
    )


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any type, transposed or not, with or without elements, sometimes a parameter."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = draw(st.sampled_from([d for d in DTYPES if shape or d != torch.float4_e2m1fn_x2]))
    tensor = random_bits(shape, dtype, draw(st.integers(0, 2**32)))
    if len(shape) > 1 and dtype != torch.float4_e2m1fn_x2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if draw(st.integers(0, 4)) == 0:
        wants = dtype in (torch.float32, torch.bfloat16) and draw(st.booleans())
        tensor = torch.nn.Parameter(tensor, requires_grad=wants)
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Numpy arrays and scalars."""
    names = ["bool", "int8", "int64", "uint16", "uint64", "float16", "float32", "float64", "complex64"]
    array = np.array(draw(st.lists(st.integers(0, 100), max_size=4)), draw(st.sampled_from(names)))
    shape = draw(st.sampled_from([array.shape, (1, array.size), (array.size, 1)]))
    return draw(st.sampled_from([array.reshape(shape), array.reshape(shape)[::-1], np.float64(0.1), np.uint8(7)]))


small = st.sampled_from([torch.Size([]), torch.Size([2, 3]), torch.float32, torch.uint16, torch.device("cuda:1")])

states = containers(st.one_of(plain, tensors(), arrays(), small))


def assert_same(got: Any, wanted: Any) -> None:
    """Equal, with the types, the order of keys, and the bits of numbers."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(got, torch.nn.Parameter) == isinstance(wanted, torch.nn.Parameter)
        assert got.requires_grad == wanted.requires_grad
        assert same_bits(got, wanted)
        return
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert_same(list(got.items()), list(wanted.items()))
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert_same(a, b)
    elif isinstance(wanted, float):
        assert struct.pack("d", got) == struct.pack("d", wanted)
    elif isinstance(wanted, complex):
        assert struct.pack("dd", got.real, got.imag) == struct.pack("dd", wanted.real, wanted.imag)
    elif isinstance(wanted, (np.ndarray, np.generic)):
        assert (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    else:
        assert got == wanted
