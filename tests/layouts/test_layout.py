from __future__ import annotations

from collections.abc import Mapping

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
    Slice,
    Split,
    Stack,
    Transpose,
    Unstack,
)

Tensors = dict[str, torch.Tensor]


def zeros(*names: str) -> Tensors:
    return {name: torch.full((2, 2), float(i)) for i, name in enumerate(names)}


JOIN = Layout([Concat(["{p:*}.q", "{p}.k"], "{p}.qk")])


def test_results_stand_where_the_first_of_their_tensors_stood() -> None:
    layout = Layout([Concat(["{p}.q", "{p}.k"], "{p}.qk"), Split("s", ["s1", "s2"]), Stack("e.{i}", "e")])
    names = ["a.k", "x", "e.1", "s", "b.q", "a.q", "y", "e.0", "b.k"]
    assert list(layout(zeros(*names))) == ["a.qk", "x", "e", "s1", "s2", "b.qk", "y"]


def test_names_that_no_rule_touches_pass_through_unchanged() -> None:
    tensors = zeros("a.q", "a.k", "norm")
    assert JOIN(tensors)["norm"] is tensors["norm"]
    assert Layout([])(tensors) == tensors
    assert list(tensors) == ["a.q", "a.k", "norm"]


def test_one_layout_follows_another() -> None:
    tensors = zeros("a.q", "a.k")
    rename = Layout([Rename("{p}.qk", "{p}.packed")])
    assert list((JOIN | rename)(tensors)) == ["a.packed"]
    assert ((JOIN | rename) | rename) == (JOIN | (rename | rename))
    assert (JOIN | rename).inverse == rename.inverse | JOIN.inverse
    with pytest.raises(TypeError):
        _ = JOIN | dict
    with pytest.raises(TypeError):
        _ = JOIN | 3  # type: ignore[operator]


def test_a_function_follows_a_layout_and_is_followed_by_one() -> None:
    def upper(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.upper(): tensor for name, tensor in tensors.items()}

    tensors = zeros("a.q", "a.k", "norm")
    back = Layout([Rename("A.{x}", "a.{x}")])
    assert list((JOIN | upper)(tensors)) == ["A.QK", "NORM"]
    assert list((JOIN | upper | back)(tensors)) == ["a.QK", "NORM"]
    assert list((upper | back)(zeros("a.b"))) == ["a.B"]
    assert list((JOIN | upper | (JOIN | upper).links[1])(tensors)) == ["A.QK", "NORM"]
    assert repr(JOIN | upper).endswith("<locals>.upper")
    with pytest.raises(LayoutError, match="upper is a function and has no inverse"):
        _ = (JOIN | upper).inverse


def test_a_layout_among_the_rules_joins_its_rules_to_the_others() -> None:
    nested = Layout([Rename("x", "y"), JOIN | Layout([Transpose("{p:*}.qk")]), Drop("z")])
    assert nested.stages == (
        (Rename("x", "y"), *JOIN.stages[0], Drop("z")),
        (Transpose("{p:*}.qk"),),
    )
    assert list(nested(zeros("q", "x", "k", "z"))) == ["qk", "y"]


def test_two_names_can_be_exchanged() -> None:
    swapped = Layout([Rename("a", "b"), Rename("b", "a")])(zeros("a", "b"))
    assert {name: tensor[0, 0].item() for name, tensor in swapped.items()} == {"b": 0.0, "a": 1.0}


@pytest.mark.parametrize(
    ("layout", "names", "facts"),
    [
        (Layout([Rename("a", "b"), Transpose("{x}")]), ["a"], ["'a'", "Rename('a', 'b') and Transpose('{x}')", "|"]),
        (Layout([Rename("a", "b")]), ["a", "b"], ["'b' comes out twice", "Rename('a', 'b') makes", "passes through"]),
        (Layout([Rename("a", "b")]), ["b", "a"], ["'b' comes out twice", "Rename('a', 'b') makes", "passes through"]),
        (Layout([Rename("a", "c"), Rename("b", "c")]), ["a", "b"], ["'c'", "Rename('a', 'c')", "Rename('b', 'c')"]),
        (JOIN, ["x.q", "y.q", "y.k"], ["'x.k' missing", "'x.q'", repr(JOIN.stages[0][0])]),
        (JOIN, ["x.k", "y.k", "z.q"], ["'x.q' missing", "2 more groups"]),
        (Layout([Stack("x.{i}", "x")]), ["x.0", "x.3"], ["'x.1', 'x.2' missing", "'x.0', 'x.3'"]),
        (Layout([Stack("x.{i}", "x")]), ["x.9999999999"], ["'x.0', 'x.1', 'x.2', ... missing"]),
        (Layout([Stack("x.{i}", "x", count=3)]), ["x.0", "x.1"], ["'x.2' missing"]),
        (Layout([Stack("x.{i}", "x", count=2)]), ["x.2"], ["'x.2'", "count=2"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["call", "stream"])
def test_names_that_do_not_fit_are_refused(layout: Layout, names: list[str], facts: list[str], way: str) -> None:
    tensors = zeros(*names)
    with pytest.raises(LayoutError) as caught:
        _ = layout(tensors) if way == "call" else list(layout.stream(tensors.items()))
    for fact in facts:
        assert fact in str(caught.value)


@pytest.mark.parametrize("name", ["x.q", "norm"])
def test_a_stream_that_brings_a_name_twice_is_refused(name: str) -> None:
    tensor = torch.zeros(1)
    with pytest.raises(LayoutError, match=f"'{name}' comes"):
        list(JOIN.stream([(name, tensor), (name, tensor)]))


def test_scoped_renames_all_names_of_the_part_and_no_others() -> None:
    tensors = zeros("model.a.q", "model.a.k", "model.norm", "modelx", "a.q", "head")
    assert list(JOIN.scoped("model.")(tensors)) == ["model.a.qk", "model.norm", "modelx", "a.q", "head"]
    assert list(JOIN.scoped("model.", "net.")(tensors)) == ["net.a.qk", "net.norm", "modelx", "a.q", "head"]
    assert list(JOIN.scoped("", "net.")(zeros("q", "k", "norm"))) == ["net.qk", "net.norm"]
    assert next(iter(JOIN.scoped("a.", "").scoped("model.", "m.")(tensors))) == "m.qk"
    assert JOIN.scoped("model", "net") == JOIN.scoped("model.", "net.")


def test_scoped_has_an_inverse() -> None:
    tensors = zeros("model.a.q", "model.a.k", "model.norm", "head")
    layout = JOIN.scoped("model.", "net.")
    restored = layout.inverse(layout(tensors))
    assert list(restored) == list(tensors)
    assert all(torch.equal(restored[name], tensor) for name, tensor in tensors.items())


def test_every_rule_can_be_scoped() -> None:
    rules = [
        Rename("a", "b"),
        Concat(["q", "k"], "qk"),
        Split("s", ["s1", "s2"]),
        Stack("e.{i}", "e"),
        Unstack("u", "u.{i}"),
        Transpose(["t", "t2"]),
        Rearrange("r", "a b -> b a"),
        Slice("l", 0, 1),
        Apply(["f", "f2"], ["g", "g2"], lambda f, f2: (f2, f)),
        Cast("c", torch.bfloat16),
        Drop("d"),
    ]
    names = ["a", "q", "k", "s", "e.0", "e.1", "u", "t", "t2", "r", "l", "f", "f2", "c", "d", "rest"]
    plain = Layout(rules)(zeros(*names))
    scoped = Layout(rules).scoped("m.", "n.")({f"m.{name}": tensor for name, tensor in zeros(*names).items()})
    assert list(scoped) == [f"n.{name}" for name in plain]
    assert all(torch.equal(scoped[f"n.{name}"], tensor) for name, tensor in plain.items())


def test_a_layout_prints_as_it_is_written() -> None:
    layout = JOIN | Layout([Rename("a", "b"), Drop("c")])
    assert repr(layout) == (
        "Layout([Concat(['{p:*}.q', '{p}.k'], '{p}.qk')]) | Layout([\n    Rename('a', 'b'),\n    Drop('c'),\n])"
    )
    assert eval(repr(layout)) == layout
    assert repr(Layout([])) == "Layout([])"
    assert layout != JOIN
    assert len({layout, eval(repr(layout)), JOIN}) == 2
