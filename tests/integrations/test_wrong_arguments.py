"""What people give to the calls of transformers by mistake; and what is taken though transformers does not know it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import hf_stream
from hf_stream.errors import ArgumentError, ArgumentTypeError
from hf_stream.layouts import Rename, packed_gate_up

Mistake = Callable[[Path, Any], Any]
WRONG: dict[str, tuple[Mistake, str]] = {
    "no-class": (
        lambda path, model: hf_stream.from_pretrained(str(path)),
        r"a class of transformers first, got '.*'; write hf_stream.from_pretrained\(AutoModelForCausalLM, path\)",
    ),
    "no-class-Path": (lambda path, model: hf_stream.from_pretrained(path), "a class of transformers first"),
    "round": (
        lambda path, model: hf_stream.from_pretrained(path, AutoModelForCausalLM),
        "a class of transformers first",
    ),
    "no-model": (lambda path, model: hf_stream.from_pretrained(torch.nn.Linear, path), "got the class Linear"),
    "no-path": (lambda path, model: hf_stream.from_pretrained(AutoModelForCausalLM), "which checkpoint"),
    "tensors": (
        lambda path, model: hf_stream.from_pretrained(AutoModelForCausalLM, dict(model.state_dict())),
        "got a dict; tensors go to state_dict=",
    ),
    "layout-name": (
        lambda path, model: hf_stream.from_pretrained(AutoModelForCausalLM, path, layout="packed-qkv"),
        "layout= is 'packed-qkv'; pass hf_stream.layouts.get",
    ),
    "layout-of-auto": (
        lambda path, model: hf_stream.AutoModelForCausalLM.from_pretrained(path, layout=[Rename("a", "b")]),
        "layout= is a list; put rules into a Layout",
    ),
    "layout-uncalled": (
        lambda path, model: hf_stream.save_pretrained(model, path / "out", layout=packed_gate_up),
        "if it makes a layout, pass what it returns",
    ),
    "layout-of-block": (lambda path, model: hf_stream.streaming("packed-qkv").__enter__(), "layout= is 'packed-qkv'"),
    "buffer": (
        lambda path, model: hf_stream.from_pretrained(AutoModelForCausalLM, path, buffer_size=None),
        "buffer_size= is None",
    ),
    "save-first": (lambda path, model: hf_stream.save_pretrained(path / "out", model), "a model of transformers first"),
    "save-tensors": (
        lambda path, model: hf_stream.save_pretrained(model.state_dict(), path / "out"),
        "use hf_stream.save_checkpoint",
    ),
    "save-module": (
        lambda path, model: hf_stream.save_pretrained(torch.nn.Linear(1, 1), path / "out"),
        r"hf_stream.save_checkpoint\(module.state_dict\(\), directory\)",
    ),
    "save-path": (
        lambda path, model: hf_stream.save_pretrained(model, path / "out", state_dict="dir"),
        "state_dict= is 'dir'; pass a mapping of names to tensors",
    ),
    "save-numpy": (
        lambda path, model: hf_stream.save_pretrained(model, path / "out", state_dict={"a": np.ones(1)}),
        "state_dict=: 'a' is a numpy.ndarray and no tensor",
    ),
    "save-size": (
        lambda path, model: hf_stream.save_pretrained(model, path / "out", max_shard_size=None),
        "max_shard_size= is None",
    ),
}


@pytest.mark.parametrize(("mistake", "words"), WRONG.values(), ids=WRONG)
def test_wrong_types_are_type_errors_that_say_what_to_give(random_model, saved, mistake: Mistake, words: str) -> None:
    path = Path(saved("llama"))
    with pytest.raises(ArgumentTypeError, match=words):
        mistake(path, random_model("llama"))
    assert not (path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_shard_size": -1}, "max_shard_size= is -1"),
        ({"max_shard_size": "5 gigabytes"}, "unit 'gigabytes'"),
        ({"buffer_size": "some"}, "buffer_size=: size 'some'"),
    ],
)
def test_sizes_that_are_none_are_refused_before_anything_is_written(
    random_model, tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        hf_stream.save_pretrained(random_model("llama"), tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bf17", "int8", torch.int8, torch.float4_e2m1fn_x2, {"": "bf17"}])
def test_types_that_are_none_are_refused_by_their_names(saved, dtype: Any) -> None:
    with pytest.raises(ArgumentError, match="dtype= is "):
        hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=dtype)
    with pytest.raises(ArgumentError, match="dtype= is "):
        hf_stream.from_pretrained(AutoModelForCausalLM, saved("llama"), dtype=dtype)


@pytest.mark.parametrize("dtype", ["bf16", "torch.bfloat16", "BF16", {"": "bf16"}])
@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
def test_short_names_of_types_are_those_of_plain_transformers(saved, dtype: Any, argument: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=torch.bfloat16)
    for ours in (
        hf_stream.from_pretrained(AutoModelForCausalLM, saved("llama"), **{argument: dtype}),
        hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama"), **{argument: dtype}),
    ):
        assert ours.dtype == plain.dtype == torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["auto", None, "float16", torch.float16])
def test_types_that_transformers_knows_are_its_own(saved, dtype: Any) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=dtype)
    assert hf_stream.from_pretrained(AutoModelForCausalLM, saved("llama"), dtype=dtype).dtype == plain.dtype


def test_sizes_in_text_are_taken(random_model, tmp_path: Path) -> None:
    model = random_model("llama")
    hf_stream.save_pretrained(model, tmp_path, max_shard_size="12KiB", buffer_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with hf_stream.streaming(buffer_size="1 MiB"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hf_stream.verify(model, again)
    hf_stream.enable(buffer_size="1MB")
    hf_stream.disable()
