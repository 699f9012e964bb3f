from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hf_stream import LayoutError
from hf_stream.layouts import Composable, Layout, Rename


class Suffixed(Composable):
    """Names with something after them."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name + self.suffix: tensor for name, tensor in tensors.items()}

    def new_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, "said": config.get("said", "") + self.suffix}

    def __repr__(self) -> str:
        return f"Suffixed({self.suffix!r})"


class Undone(Suffixed):
    """A layout with a way back."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removesuffix(self.suffix): tensor for name, tensor in tensors.items()}

    @property
    def inverse(self) -> Suffixed:
        return Suffixed(self.suffix)


A = {"a": torch.zeros(1)}
RENAME = Layout([Rename("a", "b")])


def test_layouts_of_both_kinds_follow_one_another_from_left_to_right() -> None:
    assert list((RENAME | Suffixed("1"))(A)) == ["b1"]
    assert list((Suffixed("1") | Layout([Rename("a1", "c")]))(A)) == ["c"]
    chain = RENAME | Suffixed("1") | Suffixed("2") | Layout([Rename("b12", "d")])
    assert list(chain(A)) == ["d"]
    assert repr(chain) == "Layout([Rename('a', 'b')]) | Suffixed('1') | Suffixed('2') | Layout([Rename('b12', 'd')])"
    assert chain.new_config({"x": 1}) == {"x": 1, "said": "12"}


def test_the_inverse_of_a_chain_undoes_the_last_first() -> None:
    chain = Layout([Rename("a", "b.x")]) | Undone(".x")
    assert list(chain(A)) == ["b"]
    assert list(chain.inverse(chain(A))) == ["a"]
    with pytest.raises(LayoutError, match=r"Suffixed\('1'\) cannot be inverted"):
        _ = (chain | Suffixed("1")).inverse


@pytest.mark.parametrize("other", ["text", 3, Layout])
def test_other_things_do_not_compose(other: Any) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = Suffixed("1") | other
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = other | Suffixed("1")


def test_a_part_of_a_bigger_model() -> None:
    whole = {"left.a": torch.zeros(1), "right.a": torch.ones(1)}
    assert set(Suffixed("1").scoped("left.")(whole)) == {"left.a1", "right.a"}
    moved = Undone("1").scoped("left.", "text.")
    tensors = {"left.a1": torch.zeros(1), "right.a": torch.ones(1)}
    assert set(moved(tensors)) == {"text.a", "right.a"}
    assert set(moved.inverse(moved(tensors))) == set(tensors)
    assert repr(moved) == "(Suffixed('1')).scoped('left.', 'text.')"
    assert Suffixed("1").scoped("left.").new_config({}) == {"said": "1"}
    assert repr(Suffixed("1").scoped("left")) == repr(Suffixed("1").scoped("left."))
    with pytest.raises(LayoutError, match=r"'right\.a' comes out twice"):
        Undone("1").scoped("left.", "right.")(tensors)
