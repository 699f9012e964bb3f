"""A checkpoint that another process replaces while it is being loaded loads as one of the two, and never as both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from same_models import assert_same

import hf_stream
from hf_stream.errors import CheckpointError
from hf_stream.integrations.transformers import load

SHARD = "12KB"
Opener = Callable[..., Any]


@pytest.fixture
def other(random_model) -> transformers.PreTrainedModel:
    """The same model with other weights, and with something else in its config that no shape tells."""
    model = copy.deepcopy(random_model("llama"))
    model.config.rms_norm_eps = 0.25
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    return model


def replaced_before(monkeypatch: pytest.MonkeyPatch, times: range, replace: Callable[[], object]) -> None:
    """Have the checkpoint replaced before the files of these numbers are opened."""
    plain, opened = load.open_files, 0

    def open_files(*args: Any, **kwargs: Any) -> Any:
        nonlocal opened
        if opened in times:
            replace()
        opened += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(load, "open_files", open_files)


@pytest.mark.parametrize("cls", [hf_stream.AutoModelForCausalLM, None])
@pytest.mark.parametrize("size", [SHARD, "30KB", "50GB"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_it_is_loaded_again_from_the_start(
    random_model, other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, size: str, cls: Any
) -> None:
    hf_stream.save_pretrained(random_model("llama"), tmp_path, max_shard_size=SHARD)
    replaced_before(
        monkeypatch,
        range(number, number + 1),
        lambda: hf_stream.save_pretrained(other, tmp_path, max_shard_size=size),
    )
    if cls is None:
        loaded = hf_stream.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    else:
        loaded = cls.from_pretrained(tmp_path)
    assert_same(loaded, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.config.rms_norm_eps == 0.25


def test_files_of_torch_save_are_not_mixed_either(
    random_model, other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(model: transformers.PreTrainedModel) -> None:
        model.config.save_pretrained(tmp_path)
        state = model.state_dict()
        torch.save(state, tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "pytorch_model.bin")

    save(random_model("llama"))
    plain, calls = load.bin_state, 0

    def bin_state(file: str) -> Any:
        nonlocal calls
        state = plain(file)
        calls += 1
        if calls == 1:
            save(other)
        return state

    monkeypatch.setattr(load, "bin_state", bin_state)
    loaded = hf_stream.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    assert_same(loaded, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.config.rms_norm_eps == 0.25


def test_what_never_stands_still_is_an_error_that_says_so(
    random_model, other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_stream.checkpoint.again.PAUSES", (0.0, 0.0))
    hf_stream.save_pretrained(random_model("llama"), tmp_path, max_shard_size=SHARD)
    replaced_before(
        monkeypatch, range(1, 1000), lambda: hf_stream.save_pretrained(other, tmp_path, max_shard_size=SHARD)
    )
    with pytest.raises(CheckpointError, match=r"was replaced while it was being (opened|loaded)"):
        hf_stream.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)


def test_an_error_in_files_that_stand_still_is_not_tried_again(
    random_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_stream.save_pretrained(random_model("llama"), tmp_path)
    calls = []

    def layout(tensors: Any) -> Any:
        calls.append(tensors)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hf_stream.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, layout=layout)
    assert len(calls) == 1
