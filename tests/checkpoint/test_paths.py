"""An empty path, such as that of a variable which is not set, is refused wherever a path is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import run
from samples import files_of

import hf_stream
from hf_stream.checkpoint import clean, settle
from hf_stream.errors import CheckpointError
from hf_stream.layouts import get, merge_lora

W = {"w": torch.ones(2)}
CALLS: dict[str, Callable[[], object]] = {
    "open_checkpoint": lambda: hf_stream.open_checkpoint(""),
    "open_nested": lambda: hf_stream.open_nested(""),
    "load_nested": lambda: hf_stream.load_nested(""),
    "verify": lambda: hf_stream.verify("", "."),
    "convert from": lambda: hf_stream.convert("", "out"),
    "convert the whole of": lambda: hf_stream.convert("", "out.safetensors"),
    "convert to": lambda: hf_stream.convert("source", ""),
    "plan_conversion": lambda: hf_stream.plan_conversion("source", ""),
    "save_checkpoint": lambda: hf_stream.save_checkpoint(W, ""),
    "save_nested": lambda: hf_stream.save_nested(W, ""),
    "CheckpointWriter": lambda: hf_stream.CheckpointWriter("", W),
    "settle": lambda: settle(""),
    "clean": lambda: clean(""),
    "merge_lora": lambda: merge_lora(""),
    "merge-lora=": lambda: get("merge-lora="),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a checkpoint, with another one inside."""
    for path in (tmp_path, tmp_path / "source"):
        hf_stream.save_checkpoint({"w": torch.ones(3)}, path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_an_empty_path_is_not_the_current_directory(here: Path, name: str) -> None:
    before = files_of(here)
    with pytest.raises(CheckpointError, match=r"the path is empty; .* '\.' for the current directory"):
        CALLS[name]()
    assert files_of(here) == before


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "source", ""),
        ("convert", "", "out"),
        ("convert", "", "out", "--layout", "packed-qkv"),
        ("plan", ""),
        ("inspect", ""),
        ("verify", "", "source"),
        ("verify", "source", ""),
        ("clean", ""),
    ],
)
def test_nor_on_the_command_line(here: Path, words: tuple[str, ...]) -> None:
    before = files_of(here)
    result = run(*words)
    assert result.exit_code == 2
    assert "error: the path is empty" in result.stderr
    assert files_of(here) == before


def test_a_dot_is(here: Path) -> None:
    hf_stream.convert("source", ".")
    assert hf_stream.open_checkpoint(".")["w"].shape == (3,)
