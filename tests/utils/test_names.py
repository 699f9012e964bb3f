from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_stream.utils.names import group_names


def labels(*names: str) -> list[str]:
    return [group.label for group in group_names((name, None) for name in names)]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a.0.w", "a.1.w", "a.2.w"], ["a.{0..2}.w"]),
        (["a.0.w", "b", "a.1.w"], ["a.{0..1}.w", "b"]),
        (["a.0.w", "a.1.w", "a.3.w", "a.7.w", "a.8.w"], ["a.{0..1,3,7..8}.w"]),
        (["a.0.w", "a.2.w", "a.4.w"], ["a.{0..4..2}.w"]),
        (["a.10.w", "a.9.w"], ["a.{9..10}.w"]),
        (["state/0/x", "state/1/x"], ["state/{0..1}/x"]),
        (["layer1.w", "layer2.w"], ["layer1.w", "layer2.w"]),
        (["a.00.w", "a.01.w"], ["a.00.w", "a.01.w"]),
        (["0", "1"], ["{0..1}"]),
        (["a.0.1", "a.0.2", "a.1.1", "a.1.2"], ["a.{0..1}.{1..2}"]),
        (["a.0.1", "a.0.2", "a.1.1", "a.1.2", "a.2.1"], ["a.{0..1}.{1..2}", "a.2.1"]),
        ([], []),
    ],
)
def test_names_that_differ_in_numbers_are_one(names: list[str], wanted: list[str]) -> None:
    assert labels(*names) == wanted


def test_only_names_of_which_the_same_is_true_go_together() -> None:
    facts = [("a.0.w", (1,)), ("a.1.w", (2,)), ("a.2.w", (1,))]
    assert [(group.label, group.names) for group in group_names(facts)] == [
        ("a.{0,2}.w", ("a.0.w", "a.2.w")),
        ("a.1.w", ("a.1.w",)),
    ]


COMPONENTS = st.one_of(st.sampled_from(["w", "layers", "h1", "01"]), st.integers(0, 4).map(str))
NAMES = st.lists(st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join), max_size=30, unique=True)


@given(NAMES, st.data())
def test_groups_hold_every_name_once_in_order(names: list[str], data: st.DataObject) -> None:
    facts = {name: data.draw(st.integers(0, 1)) for name in names}
    groups = group_names(facts.items())

    assert sorted(name for group in groups for name in group.names) == sorted(names)
    assert all(len({facts[name] for name in group.names}) == 1 for group in groups)
    first = [min(map(names.index, group.names)) for group in groups]
    assert first == sorted(first)


@given(NAMES)
def test_a_label_stands_for_its_names_and_no_others(names: list[str]) -> None:
    for group in group_names((name, None) for name in names):
        pieces = [[""]]
        for piece in re.split(r"(\{[^}]*\})", group.label):
            pieces.append(expanded(piece[1:-1]) if piece.startswith("{") else [piece])
        found = [""]
        for piece in pieces:
            found = [left + right for left in found for right in piece]
        assert sorted(found) == sorted(group.names)


def expanded(braces: str) -> list[str]:
    numbers: list[int] = []
    for run in braces.split(","):
        first, *more = map(int, run.split(".."))
        numbers += range(first, (more[0] if more else first) + 1, more[1] if len(more) > 1 else 1)
    return list(map(str, numbers))


@pytest.mark.parametrize("names", [["a.0.w", "a.1.w", "a.2.w"], ["a.0.w", "a.2.w", "a.4.w"], ["a.0.1", "a.1.1"]])
def test_a_shell_expands_labels_without_gaps(names: list[str]) -> None:
    echo = subprocess.run(["bash", "-c", f"echo {labels(*names)[0]}"], capture_output=True, text=True, check=True)
    assert echo.stdout.split() == names
