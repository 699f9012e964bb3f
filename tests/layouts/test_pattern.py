from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_stream.errors import LayoutError
from hf_stream.layouts.pattern import compile_patterns


def match(pattern: str, name: str) -> dict[str, str] | None:
    return compile_patterns([pattern])[0].match(name)


@pytest.mark.parametrize(
    ("pattern", "name", "bindings"),
    [
        ("model.norm.weight", "model.norm.weight", {}),
        ("model.norm.weight", "modelXnorm.weight", None),
        ("model.norm.weight", "model.norm.weight.x", None),
        ("a+b.(c)[d]", "a+b.(c)[d]", {}),
        ("layers.{layer}.w", "layers.3.w", {"layer": "3"}),
        ("layers.{layer}.w", "layers.3.4.w", None),
        ("layers.{layer}.w", "layers..w", None),
        ("layer_{i}_{j}.w", "layer_3_q.w", {"i": "3", "j": "q"}),
        ("{i}{kind:_q|_k}.w", "3_k.w", {"i": "3", "kind": "_k"}),
        ("a+{i}+.w", "a+3+.w", {"i": "3"}),
        ("a+{i}+.w", "aa3+.w", None),
        ("{i}.{i}", "3.3", {"i": "3"}),
        ("{i}.{i}", "3.4", None),
        ("experts.{e:int}", "experts.10", {"e": "10"}),
        ("experts.{e:int}", "experts.010", None),
        ("experts.{e:int}", "experts.shared", None),
        ("q.{kind:weight|bias}", "q.bias", {"kind": "bias"}),
        ("q.{kind:weight|bias}", "q.weight_scale", None),
        ("q.{kind:a+|b}", "q.a+", {"kind": "a+"}),
        ("{p:*}.w", "w", {"p": ""}),
        ("{p:*}.w", "a.b.w", {"p": "a.b"}),
        ("{p:*}.w", "aw", None),
        ("{p:+}.w", "w", None),
        ("{p:+}.w", "a.w", {"p": "a"}),
        ("a.{rest:*}", "a", {"rest": ""}),
        ("a.{rest:*}", "ab", None),
        ("a.{rest:+}", "a", None),
        ("a.{rest:+}", "a.b.c", {"rest": "b.c"}),
        ("{all:*}", "a.b", {"all": "a.b"}),
        ("{p:*}.mlp.{rest:+}", "mlp.w", {"p": "", "rest": "w"}),
        ("{p:*}.mlp.{rest:*}", "a.mlp", {"p": "a", "rest": ""}),
        ("a.{p:*}.b", "a.b", {"p": ""}),
        ("a.{p:*}.b", "a.x.y.b", {"p": "x.y"}),
    ],
)
def test_a_pattern_matches_whole_names_and_writes_them_back(
    pattern: str, name: str, bindings: dict[str, str] | None
) -> None:
    compiled = compile_patterns([pattern])[0]
    assert compiled.match(name) == bindings
    if bindings is not None:
        assert compiled.format(bindings) == name


COMPONENT = st.text("ab01_+", min_size=1, max_size=3)
PIECE = st.one_of(COMPONENT, st.sampled_from(["{i}", "{j}", "x{i}", "{n:int}", "{k:a|b+}", "{p:*}", "{q:+}"]))


@given(st.lists(PIECE, min_size=1, max_size=5), st.data())
def test_format_then_match_gives_the_name_back(pieces: list[str], data: st.DataObject) -> None:
    pattern = ".".join(pieces)
    try:
        (compiled,) = compile_patterns([pattern])
    except LayoutError:
        return
    values = {
        "i": COMPONENT,
        "j": COMPONENT,
        "n": st.sampled_from(["0", "7", "12"]),
        "k": st.sampled_from(["a", "b+"]),
        "p": st.lists(COMPONENT, max_size=3).map(".".join),
        "q": st.lists(COMPONENT, min_size=1, max_size=3).map(".".join),
    }
    name = compiled.format({field: data.draw(values[field]) for field in compiled.fields})
    if name:
        bindings = compiled.match(name)
        assert bindings is not None
        assert compiled.format(bindings) == name


def test_what_a_placeholder_stands_for_is_shared_by_the_patterns_of_a_rule() -> None:
    src, dst = compile_patterns(["{p:*}.query.{kind:weight|bias}", "{p}.q.{kind}"])
    assert dst.match("a.b.q.weight") == {"p": "a.b", "kind": "weight"}
    assert dst.match("a.b.q.scale") is None
    assert dst.format(src.match("query.bias") or {}) == "q.bias"


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["a.{b"], "a brace"),
        (["a.b}"], "a brace"),
        (["a.{}"], "a brace"),
        (["a.{0}"], "not a name"),
        ([""], "empty"),
        (["x{p:*}.w"], "dots around it"),
        (["{p:*}.w.{p}"], "use it once"),
        (["{p:*}.{q:+}"], "side by side"),
        (["a.{b}{c}.w"], "nothing tells where {b} ends and {c} begins"),
        (["{p:*}.w", "{p:int}.w"], "elsewhere in the rule"),
        (["*.dense.weight"], "is a glob ('*'), and not a name with placeholders. Write '{prefix:*}.dense.weight'."),
        (["layers.*.mlp.*"], "Write 'layers.{x}.mlp.{rest:+}'."),
        (["*attn.weight"], "is a glob ('*'), and not a name with placeholders. Write {layer} for a piece"),
        (["layers.[0-9].weight"], "is a glob ('[0-9]')"),
        (["layers.?.weight"], "is a glob ('?')"),
        ([r"layers\.(\d+)\.weight"], "is a regular expression"),
        ([".*dense.weight"], "is a regular expression"),
        (["a.(q|k).weight"], "is a regular expression ('|')"),
        (["^a.weight$"], "is a regular expression ('^')"),
        (["a.{i:in}.w"], "{i:in} would fit 'in' alone, a word that needs no braces. Write {layer}"),
        ([r"a.{i:\d+}.w"], "is no list of words"),
        (["a.{i:[0-9]+|x}.w"], "is no list of words"),
        (["a.{i:x|}.w"], "is no list of words"),
    ],
)
def test_a_malformed_pattern_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        compile_patterns(patterns)
