from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_stream.errors import LayoutError
from hf_stream.layouts import Concat, Layout, Rename, Rule, Stack, Transpose
from hf_stream.layouts.dispatch import Dispatcher
from hf_stream.layouts.pattern import Pattern, compile_patterns

WORD = st.sampled_from(["a", "b", "c", "0", "1"])
PIECE = st.one_of(WORD, st.sampled_from(["{i}", "{j}", "a{i}", "{n:int}", "{p:*}", "{q:+}"]))


@given(
    st.lists(st.lists(PIECE, min_size=1, max_size=4).map(".".join), max_size=8),
    st.lists(st.lists(WORD, min_size=1, max_size=5).map(".".join), max_size=20),
)
def test_finds_what_trying_every_pattern_finds(texts: list[str], names: list[str]) -> None:
    patterns: list[Pattern] = []
    for text in texts:
        try:
            patterns += compile_patterns([text])
        except LayoutError:
            continue
    dispatcher = Dispatcher((pattern, number) for number, pattern in enumerate(patterns))
    for name in names:
        tried = [(number, pattern.match(name)) for number, pattern in enumerate(patterns)]
        assert dispatcher.find(name) == [(number, bindings) for number, bindings in tried if bindings is not None]


def lines_executed(run: Any) -> int:
    """Lines of Python that `run()` executes: a measure of work that does not depend on the machine."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def moe(layers: int, experts: int) -> dict[str, torch.Tensor]:
    tensor = torch.zeros(1, 1, device="meta")
    projections = [f"mlp.experts.{e}.{p}_proj.weight" for e in range(experts) for p in ("gate", "up", "down")]
    projections += [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    return {f"model.layers.{layer}.{module}": tensor for layer in range(layers) for module in projections}


def test_work_grows_linearly_with_the_number_of_tensors() -> None:
    layout = Layout(
        [
            Concat([f"{{p:*}}.self_attn.{x}_proj.weight" for x in "qkv"], "{p}.qkv"),
            *[Stack(f"{{p:*}}.experts.{{e}}.{x}_proj.weight", f"{{p}}.experts.{x}") for x in ("gate", "up", "down")],
        ]
    ) | Layout([Rename("model.{rest:+}", "{rest}")])
    small, large = moe(4, 32), moe(8, 64)
    layout(small)
    ratio = lines_executed(lambda: layout(large)) / lines_executed(lambda: layout(small))
    assert ratio < 1.3 * len(large) / len(small)


def test_work_for_a_name_does_not_grow_with_the_number_of_rules() -> None:
    names = [f"layers.{i}.w" for i in range(400)]
    tensors = {name: torch.zeros(1, 1, device="meta") for name in names}
    few = Layout([Transpose(name) for name in names[:20]])
    rules: list[Rule] = [Transpose(name) for name in names]
    rules += [Rename(f"{{p:*}}.x{i}.{{kind:weight|bias}}", f"{{p}}.y{i}.{{kind}}", optional=True) for i in range(400)]
    many = Layout(rules)
    ratio = lines_executed(lambda: many(tensors)) / lines_executed(lambda: few(tensors))
    assert ratio < 4  # 380 more names match, which costs more than passing through
