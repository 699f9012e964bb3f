"""What a stream holds: proved by weak references to the tensors that went in."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts import Apply, Concat, Layout, Rename, Split, Stack

Pairs = Iterator[tuple[str, torch.Tensor]]


class Source:
    """Yields fresh tensors and knows which of them are still alive, and which have been asked for."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []
        self._made: dict[str, weakref.ref[torch.Tensor]] = {}

    def pairs(self) -> Pairs:
        for name in self.names:
            self.asked.append(name)
            yield name, self._make(name)

    def _make(self, name: str) -> torch.Tensor:
        tensor = torch.zeros(2, 2)
        self._made[name] = weakref.ref(tensor)
        return tensor

    def alive(self) -> list[str]:
        return [name for name, ref in self._made.items() if ref() is not None]


JOIN = Layout([Concat(["{p}.q", "{p}.k"], "{p}.qk")])


def test_a_result_comes_with_its_last_tensor_and_its_tensors_are_gone_by_then() -> None:
    source = Source("a.q", "b.q", "b.k", "c.k", "a.k", "c.q")
    stream = JOIN.stream(source.pairs())
    seen = [(name, list(source.asked), source.alive()) for name, _ in stream]
    assert seen == [
        ("b.qk", ["a.q", "b.q", "b.k"], ["a.q"]),
        ("a.qk", ["a.q", "b.q", "b.k", "c.k", "a.k"], ["c.k"]),
        ("c.qk", ["a.q", "b.q", "b.k", "c.k", "a.k", "c.q"], []),
    ]


def test_a_tensor_that_passes_through_belongs_to_the_receiver_alone() -> None:
    source = Source("x", "y")
    stream = (JOIN | JOIN).stream(source.pairs())
    _, tensor = next(stream)
    assert source.alive() == ["x"]
    del tensor
    assert source.alive() == []


def test_what_one_layout_makes_is_not_held_while_the_next_one_yields() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def fresh(tensor: torch.Tensor) -> list[torch.Tensor]:
        results = [tensor + 1, tensor + 2]
        made.extend(map(weakref.ref, results))
        return results

    layout = Layout([Apply("{p}.w", ["{p}.q", "{p}.k"], fresh)]) | JOIN
    for name, _ in layout.stream(Source("a.w", "b.w").pairs()):
        assert name in ("a.qk", "b.qk")
        assert [ref for ref in made if ref() is not None] == []
    assert len(made) == 4


def test_a_composition_streams_through() -> None:
    layout = (
        Layout([Stack("{p}.{i}.g", "{p}.g", count=2), Stack("{p}.{i}.u", "{p}.u", count=2)])
        | Layout([Concat(["{p}.g", "{p}.u"], "{p}.gu", dim=1)])
        | Layout([Rename("{p}.gu", "{p}.gate_up")])
    )
    source = Source(*(f"{p}.{i}.{x}" for p in "ab" for i in range(2) for x in "gu"))
    stream = layout.stream(source.pairs())
    name, tensor = next(stream)
    assert (name, list(tensor.shape)) == ("a.gate_up", [2, 4, 2])
    assert source.asked[-1] == "a.1.u"
    assert source.alive() == []
    assert [name for name, _ in stream] == ["b.gate_up"]


def test_without_a_count_stacks_come_at_the_end_one_by_one() -> None:
    source = Source("a.0", "b.0", "x", "b.1", "a.1")
    stream = Layout([Stack("{p}.{i}", "{p}")]).stream(source.pairs())
    assert next(stream)[0] == "x"
    assert next(stream)[0] == "a"
    assert source.alive() == ["b.0", "b.1"]
    assert next(stream)[0] == "b"
    assert source.alive() == []


def test_an_incomplete_group_is_an_error_at_the_end() -> None:
    stream = JOIN.stream(Source("a.q", "b.q", "b.k").pairs())
    assert next(stream)[0] == "b.qk"
    with pytest.raises(LayoutError, match=r"'a\.k' missing"):
        next(stream)


def test_nothing_is_asked_for_before_the_first_result_is() -> None:
    source = Source("a", "b")
    stream = Layout([Split("a", ["a1", "a2"])]).stream(source.pairs())
    assert source.asked == []
    assert next(stream)[0] == "a1"
    assert next(stream)[0] == "a2"
    assert source.asked == ["a"]
