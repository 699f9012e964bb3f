"""Each rule against the torch or einops expression it stands for."""

from __future__ import annotations

import re
import sys

import einops
import pytest
import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts import (
    Apply,
    Cast,
    Concat,
    Drop,
    Layout,
    Rearrange,
    Rename,
    Rule,
    Slice,
    Split,
    Stack,
    Transpose,
    Unstack,
)

Tensors = dict[str, torch.Tensor]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def check(rule: Rule, given: Tensors, wanted: Tensors) -> None:
    got = Layout([rule])(given)
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)


def test_rename_keeps_the_tensor_itself() -> None:
    w = rand(2)
    assert Layout([Rename("a.{i}", "b.{i}.c")])({"a.3": w})["b.3.c"] is w


def test_concat_and_split() -> None:
    q, k, v = rand(4, 3), rand(2, 3), rand(2, 3)
    rule = Concat(["{p:*}.q", "{p}.k", "{p}.v"], "{p}.qkv", sizes=(2, 1, 1))
    check(
        rule,
        {"q": q, "x.k": k, "k": k, "x.v": v, "v": v, "x.q": q},
        {"qkv": torch.cat([q, k, v]), "x.qkv": torch.cat([q, k, v])},
    )
    check(rule.invert(), {"x.qkv": torch.cat([q, k, v])}, {"x.q": q, "x.k": k, "x.v": v})
    assert rule.invert().invert() == rule


@pytest.mark.parametrize("dim", [1, -1])
def test_concat_and_split_along_another_dimension(dim: int) -> None:
    a, b = rand(3, 4), rand(3, 4)
    check(Concat(["a", "b"], "ab", dim=dim), {"a": a, "b": b}, {"ab": torch.cat([a, b], dim)})
    check(Split("ab", ["a", "b"], dim=dim), {"ab": torch.cat([a, b], dim)}, {"a": a, "b": b})


def test_groups_deal_the_pieces_in_turn() -> None:
    q, k = rand(12, 2), rand(6, 2)
    dealt = einops.rearrange(
        torch.cat([q.view(3, 4, 2), k.view(3, 2, 2)], dim=1), "groups rows i -> (groups rows) i", groups=3
    )
    check(Concat(["q", "k"], "qk", sizes=(12, 6), groups=3), {"q": q, "k": k}, {"qk": dealt})
    check(Split("qk", ["q", "k"], sizes=(2, 1), groups=3), {"qk": dealt}, {"q": q, "k": k})


def test_stack_orders_by_number_and_unstack_numbers_from_zero() -> None:
    tensors = {f"x.{i}.w": rand(2, 3) for i in (10, 2, 0, 1, *range(3, 10))}
    stacked = torch.stack([tensors[f"x.{i}.w"] for i in range(11)], dim=1)
    check(Stack("{p:*}.{i}.w", "{p}.w", dim=1), tensors, {"x.w": stacked})
    check(
        Unstack("{p:*}.w", "{p}.{i}.w", dim=1), {"x.w": stacked}, {f"x.{i}.w": tensors[f"x.{i}.w"] for i in range(11)}
    )


def test_stack_leaves_names_alone_that_have_no_number() -> None:
    w = rand(2)
    check(
        Stack("experts.{e}.w", "experts.w"),
        {"experts.shared.w": w, "experts.00.w": w},
        {"experts.shared.w": w, "experts.00.w": w},
    )


def test_transpose() -> None:
    w = rand(2, 3, 4)
    check(Transpose("w", 0, -1), {"w": w}, {"w": w.transpose(0, 2)})
    check(
        Transpose(["{p:*}.a", "{p:*}.b"]),
        {"a": w, "x.b": w, "c": w},
        {"a": w.transpose(0, 1), "x.b": w.transpose(0, 1), "c": w},
    )


def test_rearrange_is_einops() -> None:
    w = rand(24, 5)
    recipe = "(heads half d) i -> i (heads d half)"
    rule = Rearrange("w", recipe, heads=3, half=2)
    check(rule, {"w": w}, {"w": einops.rearrange(w, recipe, heads=3, half=2)})
    check(rule.invert(), {"w": einops.rearrange(w, recipe, heads=3, half=2)}, {"w": w})


def test_rearrange_without_einops_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "einops", None)
    with pytest.raises(ImportError, match="pip install einops"):
        Rearrange("w", "a b -> b a")


def test_slice() -> None:
    w = rand(5, 6)
    check(Slice("w", 0, 1, 4), {"w": w}, {"w": w[1:4]})
    check(Slice("w", -1, -2), {"w": w}, {"w": w[:, -2:]})


def test_cast_changes_floating_point_tensors_only() -> None:
    w, ids = rand(3), torch.arange(3)
    check(Cast("{name:+}", torch.bfloat16), {"w": w, "ids": ids}, {"w": w.bfloat16(), "ids": ids})
    assert Cast("w", torch.float32, inverse=torch.bfloat16).invert() == Cast("w", torch.bfloat16, inverse=torch.float32)


def test_drop() -> None:
    w = rand(1)
    check(Drop("{p:*}.inv_freq", "mask"), {"a.inv_freq": w, "mask": w, "w": w}, {"w": w})


def test_apply_takes_and_gives_groups() -> None:
    a, b = rand(3), rand(3)
    rule = Apply(["{p:*}.a", "{p}.b"], ["{p}.sum", "{p}.b"], lambda a, b: (a + b, b), inverse=lambda s, b: (s - b, b))
    check(rule, {"x.b": b, "x.a": a}, {"x.sum": a + b, "x.b": b})
    check(rule.invert(), {"x.sum": a + b, "x.b": b}, {"x.a": (a + b) - b, "x.b": b})
    check(Apply("a", "a", torch.neg), {"a": a}, {"a": -a})


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rename("a", "b"), "Rename('a', 'b')"),
        (Concat(["a", "b"], "c"), "Concat(['a', 'b'], 'c')"),
        (Concat(["a", "b"], "c", 1, (2, 1), 4), "Concat(['a', 'b'], 'c', dim=1, sizes=[2, 1], groups=4)"),
        (Split("c", ["a", "b"], -1), "Split('c', ['a', 'b'], dim=-1)"),
        (Stack("a.{i}", "a", count=8), "Stack('a.{i}', 'a', count=8)"),
        (Transpose("a"), "Transpose('a')"),
        (Transpose(["a", "b"], 1, 2), "Transpose(['a', 'b'], dim0=1, dim1=2)"),
        (Rearrange("a", "x y -> y x", x=3), "Rearrange('a', 'x y -> y x', x=3)"),
        (Slice("a", 0, 1, 2), "Slice('a', 0, 1, stop=2)"),
        (Cast("a", torch.bfloat16), "Cast('a', torch.bfloat16)"),
        (Drop("a", "b"), "Drop('a', 'b')"),
    ],
)
def test_a_rule_prints_as_it_is_written(rule: Rule, text: str) -> None:
    assert repr(rule) == text
    assert eval(text) == rule
    assert hash(eval(text)) == hash(rule)


@pytest.mark.parametrize(
    ("rule", "shapes", "facts"),
    [
        (Split("w", ["a", "b", "c"]), {"w": [4097, 8]}, ["'w'", "divisible by 3", "[4097, 8]", "Pass sizes="]),
        (Split("w", ["a", "b"], sizes=(2, 1), groups=4), {"w": [18]}, ["2 + 1", "4 groups", "12", "[18]"]),
        (Split("w", ["a", "b"], dim=2), {"w": [4, 4]}, ["'w'", "dimension 2", "[4, 4]"]),
        (Concat(["a", "b"], "c"), {"a": [4, 2], "b": [2, 2]}, ["'a', 'b'", "4, 2", "Pass sizes=(2, 1)"]),
        (Concat(["a", "b"], "c", sizes=(3, 1)), {"a": [4, 2], "b": [2, 2]}, ["(3, 1)", "Pass sizes=(2, 1)"]),
        (Concat(["a", "b"], "c"), {"a": [4, 2], "b": [4, 3]}, ["[4, 2]", "[4, 3]", "'a' and 'b'", "dimension 0 only"]),
        (Concat(["a", "b"], "c"), {"a": [4], "b": [4, 1]}, ["[4]", "[4, 1]"]),
        (Concat(["a", "b"], "c", groups=4), {"a": [6], "b": [6]}, ["4 groups", "6, 6", "groups="]),
        (Stack("x.{i}", "x"), {"x.0": [4], "x.1": [5]}, ["[4]", "[5]", "'x.0' and 'x.1'", "must be equal"]),
        (Stack("x.{i}", "x", dim=2), {"x.0": [4]}, ["dimension 2", "[4]"]),
        (Unstack("x", "x.{i}", count=3), {"x": [4, 5]}, ["extent 3", "[4, 5]", "count="]),
        (Unstack("x", "x.{i}"), {"x": [0, 5]}, ["at least 1", "[0, 5]"]),
        (Transpose("w"), {"w": [3]}, ["'w'", "dimension 1", "[3]"]),
        (Slice("w", 0, 0, 5), {"w": [4]}, ["0:5", "[4]"]),
        (Slice("w", 0, 3, 2), {"w": [4]}, ["3:2", "[4]"]),
        (Slice("w", 0, -5), {"w": [4]}, ["-5:", "[4]"]),
        (Rearrange("w", "(a b) -> a b", a=3), {"w": [4]}, ["'w'", "[4]", "'(a b) -> a b'", "divide"]),
        (Apply("w", "w", lambda w: w.reshape(5)), {"w": [4]}, ["'w'", "[4]", "invalid for input of size 4"]),
        (Apply("w", ["a", "b"], lambda w: w), {"w": [4]}, ["2, got 1"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_with_names_shapes_and_remedy(
    rule: Rule, shapes: dict[str, list[int]], facts: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout([rule])({name: torch.zeros(shape) for name, shape in shapes.items()})
    for fact in facts:
        assert fact in str(caught.value)
    assert repr(rule) in str(caught.value)


def test_tensors_of_different_dtypes_are_not_cast_silently() -> None:
    with pytest.raises(LayoutError, match=r"'a' and 'b' have dtypes torch.float32 and torch.bfloat16"):
        Layout([Concat(["a", "b"], "c")])({"a": rand(2), "b": rand(2, dtype=torch.bfloat16)})


def test_an_error_of_the_library_passes_through_apply_unchanged() -> None:
    from hf_stream.errors import CopyError

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        raise CopyError("'file': short read")

    with pytest.raises(CopyError, match="short read"):
        Layout([Apply("w", "w", fails)])({"w": rand(1)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rename("a.{i}", "b"), "must have the same placeholders"),
        (lambda: Concat(["{i}.a", "b"], "c"), "must have the same placeholders"),
        (lambda: Concat("abc", "c"), "takes a list of patterns"),
        (lambda: Concat([], "c"), "at least one source"),
        (lambda: Split("c", []), "at least one source and one destination"),
        (lambda: Concat(["a", "b"], "c", sizes=(1, 1, 1)), "2 sizes of at least 1"),
        (lambda: Concat(["a", "b"], "c", sizes=(1, 0)), "2 sizes of at least 1"),
        (lambda: Split("c", ["a", "b"], groups=0), "groups must be at least 1"),
        (lambda: Stack("a.{i}.{j}", "a"), "one more"),
        (lambda: Stack("a", "a"), "one more"),
        (lambda: Unstack("a.{i}", "b.{j}"), "one more"),
        (lambda: Stack("a.{i:a|b}", "a"), "elsewhere in the rule"),
        (lambda: Stack("a.{i}", "a", count=0), "count must be at least 1"),
        (lambda: Rearrange("a", "x y"), "needs one arrow"),
        (lambda: Cast("a", torch.int8), "floating-point"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_when_it_is_made(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(LayoutError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "rule", [Drop("a"), Slice("a", 0, 1), Cast("a", torch.float16), Apply("a", "a", torch.neg)], ids=repr
)
def test_a_rule_that_loses_something_has_no_inverse(rule: Rule) -> None:
    with pytest.raises(LayoutError, match="cannot be inverted") as caught:
        _ = (Layout([Rename("x", "y")]) | Layout([Transpose("b"), rule])).inverse
    assert repr(rule) in str(caught.value)


def test_named_tensors_are_stacked_and_unstacked_as_by_torch() -> None:
    q, k, v = torch.randn(3, 4, 2)
    tensors = {"a.k": k, "a.q": q, "a.v": v, "x": q}
    for dim in (0, -1):
        layout = Layout([Stack(["{p:*}.q", "{p}.k", "{p}.v"], "{p}.qkv", dim)])
        stacked = layout(tensors)
        assert list(stacked) == ["a.qkv", "x"]
        assert torch.equal(stacked["a.qkv"], torch.stack([q, k, v], dim))
        back = layout.inverse(stacked)
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert list(layout.scoped("m.")({f"m.{name}": t for name, t in tensors.items()})) == ["m.a.qkv", "m.x"]
    with pytest.raises(LayoutError, match=r"'a\.v' missing"):
        layout({"a.q": q, "a.k": k})
    with pytest.raises(LayoutError, match=r"extent 2 wanted along dimension 0, got shape \[3, 4, 2\]"):
        Layout([Unstack("a", ["b", "c"])])({"a": torch.zeros(3, 4, 2)})
    with pytest.raises(LayoutError, match="2 patterns and count=3"):
        Stack(["a", "b"], "c", count=3)
    with pytest.raises(LayoutError, match="must be equal"):
        Layout([Stack(["a", "b"], "c")])({"a": q, "b": k[:1]})
