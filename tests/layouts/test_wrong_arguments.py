"""What people give to layouts and rules by mistake: refused when they are made, in words that say what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_stream import layouts
from hf_stream.errors import ArgumentTypeError, LayoutError
from hf_stream.layouts import (
    AnyOf,
    Apply,
    Cast,
    Concat,
    Drop,
    Layout,
    Rearrange,
    Rename,
    Slice,
    Split,
    Stack,
    Transpose,
    Unstack,
    dequantize_fp8_blocks,
    packed_gate_up,
)

WRONG_TYPES: dict[str, tuple[Callable[[], Any], str]] = {
    "arrow": (lambda: Layout(["a -> b"]), r"'a -> b' is no rule; write Rename\('a', 'b'\)"),
    "text": (lambda: Layout(["a"]), r"'a' is no rule; a rule is an object, such as Rename\("),
    "one-rule": (lambda: Layout(Rename("a", "b")), r"put it in brackets: Layout\(\[Rename\('a', 'b'\)\]\)"),
    "one-layout": (lambda: Layout(packed_gate_up()), r"put it in brackets: Layout\(\[Layout\(\["),
    "one-text": (lambda: Layout("a->b"), r"got 'a->b'; write Rename\('a', 'b'\)"),
    "nothing": (lambda: Layout(None), "takes a list of rules, got None"),
    "class": (lambda: Layout([Rename]), r"the class Rename is no rule; write Rename\(...\), with its arguments"),
    "uncalled": (lambda: Layout([packed_gate_up]), "the function packed_gate_up is no rule; call it"),
    "function": (lambda: Layout([lambda x: x]), r"a function of tensors goes into Apply\(srcs, dsts, function\)"),
    "code": (lambda: Layout([dequantize_fp8_blocks()]), r"let it follow, as in Layout\(\[...\]\) \| it"),
    "alternatives": (lambda: AnyOf(Rename("a", "b")), r"put it in brackets: AnyOf\(\["),
    "layout-of-path": (
        lambda: Layout([Rename("a", "b")])("dir"),
        r"got 'dir'; open it: hf_stream.open_checkpoint\('dir'\)",
    ),
    "layout-of-Path": (lambda: Layout([Rename("a", "b")])(Path("dir")), "got 'dir'; open it"),
    "layout-of-model": (lambda: Layout([Rename("a", "b")])(torch.nn.Linear(1, 1)), r"pass its .state_dict\(\)"),
    "layout-of-numpy": (lambda: Layout([Rename("a", "b")])({"a": np.ones(1)}), "'a' is a numpy.ndarray and no tensor"),
    "layout-of-numbers": (lambda: Layout([Rename("a", "b")])({1: torch.ones(1)}), "1 is no name of a tensor"),
    "code-of-path": (lambda: dequantize_fp8_blocks()("dir"), "got 'dir'; open it"),
    "stream-of-mapping": (
        lambda: list(Layout([]).stream({})),
        r"pairs of names and tensors, got a dict; pass .items\(\)",
    ),
    "stream-of-path": (lambda: list(Layout([]).stream("dir")), "pairs of names and tensors, got 'dir'"),
    "src": (lambda: Rename(1, "b"), "Rename: src= is 1; pass a text"),
    "dst": (lambda: Rename("a", ["b"]), r"Rename: dst= is \['b'\]; pass a text"),
    "none": (lambda: Rename(None, "b"), "Rename: src= is None"),
    "srcs": (lambda: Concat(["a", 1], "b"), "Concat: srcs= has an element that is 1; pass a text"),
    "src-list": (lambda: Split(["a"], ["b", "c"]), r"Split: src= is \['a'\]; pass a text"),
    "dim": (lambda: Concat(["a", "b"], "c", dim="0"), "Concat: dim= is '0'; pass a whole number"),
    "dim-float": (lambda: Split("a", ["b", "c"], dim=1.0), "Split: dim= is 1.0; pass a whole number"),
    "dim-none": (lambda: Stack("a.{i}", "b", dim=None), "Stack: dim= is None; pass a whole number"),
    "dim-bool": (lambda: Transpose("a", dim0=True), "Transpose: dim0= is True; pass a whole number"),
    "dim-pattern": (lambda: Transpose("a", "b"), "Transpose: dim0= is 'b'; pass a whole number"),
    "sizes": (lambda: Concat(["a", "b"], "c", sizes=3), "Concat: sizes= is 3; pass a list of whole numbers"),
    "sizes-text": (lambda: Concat(["a", "b"], "c", sizes="21"), "sizes= is '21'; pass a list of whole numbers"),
    "sizes-float": (lambda: Split("a", ["b", "c"], sizes=(1.5, 2)), "has an element that is 1.5; pass a whole number"),
    "groups": (lambda: Concat(["a", "b"], "c", groups="2"), "Concat: groups= is '2'"),
    "count": (lambda: Unstack("a", "b.{i}", count=1.5), "Unstack: count= is 1.5"),
    "start": (lambda: Slice("a", 0, "0", 4), "Slice: start= is '0'"),
    "stop": (lambda: Slice("a", 0, 0, 0.5), "Slice: stop= is 0.5"),
    "recipe": (lambda: Rearrange("a", 3), "Rearrange: recipe= is 3; pass a text"),
    "axis": (lambda: Rearrange("a", "(h d) i -> h (d i)", h="8"), "Rearrange: h= is '8'; pass a whole number"),
    "drop-list": (lambda: Drop(["a", "b"]), r"Drop: patterns= has an element that is \['a', 'b'\]; pass a text"),
    "patterns": (lambda: Transpose(3), "Transpose: patterns= is 3; pass a list of texts"),
    "fn": (lambda: Apply("a", "b", 3), "Apply: fn= is 3; pass a function"),
    "inverse": (lambda: Apply("a", "b", torch.neg, inverse=3), "Apply: inverse= is 3; pass a function"),
    "optional": (lambda: Rename("a", "b", optional="yes"), "Rename: optional= is 'yes'; pass True or False"),
    "dtype": (lambda: Cast("a", 16), "Cast: dtype= is 16 and no dtype of torch"),
    "dtype-numpy": (lambda: Cast("a", np.float16), "pass torch.float16"),
    "name": (lambda: layouts.get(3), "a layout has a name, got an int; the names are packed-qkv"),
    "spec": (lambda: layouts.load(None), "written as 'path/to/file.py:name', got None"),
}


@pytest.mark.parametrize(("mistake", "words"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_wrong_types_are_type_errors_that_say_what_to_write(mistake: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words) as caught:
        mistake()
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float4_e2m1fn_x2, torch.complex64, "int8", "f4"])
def test_what_no_tensor_can_be_cast_to_is_refused_when_the_rule_is_made(dtype: Any) -> None:
    with pytest.raises(LayoutError, match="Cast is for floating-point dtypes"):
        Cast("a", dtype)
    with pytest.raises(LayoutError, match="Cast is for floating-point dtypes"):
        Cast("a", torch.float32, inverse=dtype)


def test_cast_knows_types_by_their_names() -> None:
    rule = Cast("a", "bf16", inverse="torch.float32")
    assert rule == Cast("a", torch.bfloat16, inverse=torch.float32)
    assert repr(rule) == "Cast('a', torch.bfloat16, inverse=torch.float32)"
    layout = Layout([rule])
    assert layout({"a": torch.ones(2)})["a"].dtype == torch.bfloat16
    assert layout.inverse({"a": torch.ones(2, dtype=torch.bfloat16)})["a"].dtype == torch.float32


def test_numbers_of_numpy_are_numbers() -> None:
    rule = Concat(["a", "b"], "c", dim=np.int64(1), sizes=np.array([2, 1]))
    assert rule == Concat(["a", "b"], "c", dim=1, sizes=(2, 1))
    assert repr(rule) == "Concat(['a', 'b'], 'c', dim=1, sizes=[2, 1])"
    tensors = {"a": torch.ones(1, 4), "b": torch.ones(1, 2)}
    assert Layout([rule])(tensors)["c"].shape == (1, 6)


@pytest.mark.parametrize("result", [3, None, "x", np.ones(4), {"b": torch.ones(1)}, [torch.ones(1), 3]])
def test_a_function_that_gives_no_tensor_is_told(result: Any) -> None:
    dsts = ["b", "c"] if isinstance(result, list) else "b"
    with pytest.raises(
        LayoutError, match=r"'a': the function must return a tensor, or a list of tensors, got .* Rule: A"
    ):
        Layout([Apply("a", dsts, lambda x: result)])({"a": torch.ones(4)})


def test_a_function_may_give_a_tuple_or_a_list() -> None:
    for kind in (tuple, list):
        layout = Layout([Apply("a", ["b", "c"], lambda x, kind=kind: kind((x, -x)))])
        assert layout({"a": torch.ones(4)}).keys() == {"b", "c"}
