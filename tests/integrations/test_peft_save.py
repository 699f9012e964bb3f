"""Saved adapters: the files of peft's own save_pretrained, byte for byte, complete or not at all."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from samples import files_of
from transformers import PreTrainedModel

import hf_stream
from hf_stream.integrations.peft import save, save_adapters

_KINDS = ("UserWarning", "RuntimeWarning", "FutureWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in _KINDS]

Saved = Callable[..., Path]
RandomModel = Callable[[str], PreTrainedModel]
Wrapped = Callable[..., peft.PeftModel]


@pytest.fixture
def wrap(random_model: RandomModel, saved: Saved) -> Wrapped:
    def make(
        name: str, config: peft.PeftConfig, second: peft.PeftConfig | None = None, vocabulary: int | None = None
    ) -> peft.PeftModel:
        base = type(random_model(name)).from_pretrained(saved(name))
        if vocabulary:
            base.resize_token_embeddings(vocabulary)
        model = peft.get_peft_model(base, config)
        if second is not None:
            model.add_adapter("second", second)
        return model

    return make


def lora(*targets: str, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=list(targets) or ["q_proj"], **options)


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "everything": (("llama", lora(modules_to_save=["lm_head"], use_dora=True), lora(use_rslora=True)), {}),
    "biases": (("gpt2", lora("c_attn", bias="all", lora_bias=True)), {}),
    "embeddings that are targets": (("llama", lora("embed_tokens", "q_proj")), {}),
    "embeddings that were resized": (("llama", lora(), None, 100), {}),
    "embeddings on demand": (("gpt2", lora("c_attn")), {"save_embedding_layers": True}),
    "one adapter of two": (("llama", lora(), lora("k_proj")), {"selected_adapters": ["second"]}),
    "experts and tokens": (
        ("mixtral", lora(target_parameters=["mlp.experts.down_proj"], trainable_token_indices=[1])),
        {},
    ),
    "t5": (("t5", lora("q", "v", task_type="SEQ_2_SEQ_LM")), {}),
    "a pickle": (("llama", lora()), {"safe_serialization": False}),
    "ia3": (("llama", peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])), {}),
    "a prompt": (("llama", peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_peft(wrap: Wrapped, tmp_path: Path, case: str) -> None:
    made, options = CASES[case]
    model = wrap(*copy.deepcopy(made))
    for _ in range(2):  # into nothing, and over what is there
        model.save_pretrained(tmp_path / "peft", **options)
        hf_stream.save_pretrained(model, tmp_path / "ours", **options)
        expected = files_of(tmp_path / "peft")
        assert files_of(tmp_path / "ours") == expected
        for parameter in model.parameters():
            parameter.data.add_(1)
    assert any(name.startswith(("adapter_model.", "second/adapter_model.")) for name in expected)


def test_peft_loads_what_was_saved(wrap: Wrapped, random_model: RandomModel, saved: Saved, tmp_path: Path) -> None:
    model = wrap("llama", lora(), lora("k_proj"))
    hf_stream.save_pretrained(model, tmp_path / "adapters")
    base = type(random_model("llama")).from_pretrained(saved("llama"))
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    again.load_adapter(tmp_path / "adapters" / "second", "second")
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_what_peft_says_of_arguments_is_said_here(wrap: Wrapped, tmp_path: Path) -> None:
    model = wrap("llama", lora())
    with pytest.raises(ValueError, match="invalid `selected_adapters`"):
        hf_stream.save_pretrained(model, tmp_path / "adapter", True, ["other"])
    hf_stream.save_pretrained(model, tmp_path / "adapter", True, ["default"], False)
    with pytest.raises(hf_stream.LayoutError, match="PeftModel"):
        hf_stream.save_pretrained(model, tmp_path / "mapped", layout=hf_stream.Layout([]))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(hf_stream.CheckpointError, match="is a file"):
        save_adapters(model, tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["adapter", "file"]


def test_other_ranks_write_nothing_of_theirs(wrap: Wrapped, tmp_path: Path) -> None:
    save_adapters(wrap("llama", lora()), tmp_path / "adapter", is_main_process=False)
    assert files_of(tmp_path) == {}


@pytest.mark.parametrize("there", [False, True])
def test_a_save_that_fails_leaves_what_was_there(
    wrap: Wrapped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    model = wrap("llama", lora(), lora())
    if there:
        save_adapters(model, tmp_path / "adapter")
    before = files_of(tmp_path)
    for parameter in model.parameters():
        parameter.data.add_(1)

    def fail(*_: Any, **__: Any) -> None:
        raise hf_stream.CopyError("no luck")

    monkeypatch.setattr(save, "write_into", fail)
    with pytest.raises(hf_stream.CopyError, match="no luck"):
        save_adapters(model, tmp_path / "adapter")
    assert files_of(tmp_path) == before
    assert os.listdir(tmp_path) == (["adapter"] if there else [])


def test_old_weights_never_stand_beside_a_new_config(
    wrap: Wrapped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapters(wrap("llama", lora(r=4), lora(r=4)), tmp_path)
    old = files_of(tmp_path)
    rename = os.rename
    seen = []

    def watched(source: Any, target: Any, **folders: int) -> None:
        rename(source, target, **folders)
        now = files_of(tmp_path)
        for folder in ("", "second/"):
            names = [f"{folder}{name}" for name in ("adapter_config.json", "adapter_model.safetensors")]
            if all(name in now for name in names):
                seen.append(len({now[name] == old[name] for name in names}) == 1)

    model = wrap("llama", lora(r=6), lora(r=6))
    monkeypatch.setattr(os, "rename", watched)
    save_adapters(model, tmp_path)
    assert seen
    assert all(seen)
    assert files_of(tmp_path) != old


def test_saves_of_other_threads_are_plain(wrap: Wrapped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = wrap("llama", lora()), wrap("llama", lora())
    plain = save.peft_model.safe_save_file
    write_into = save.write_into

    def meanwhile(*args: Any, **kwargs: Any) -> None:
        thread = threading.Thread(target=other.save_pretrained, args=(str(tmp_path / "plain"),))
        thread.start()
        thread.join()
        write_into(*args, **kwargs)

    monkeypatch.setattr(save, "write_into", meanwhile)
    with save._hooked():
        save_adapters(model, tmp_path / "ours")
    assert files_of(tmp_path / "plain").keys() == files_of(tmp_path / "ours").keys()
    assert save.peft_model.safe_save_file is plain
