"""Every model type that transformers has conversions for goes through `layouts.from_transformers`, and back.

`SWEEP=all pytest integration_tests/test_conversions.py` tries them all, otherwise an eighth of them.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from architectures import model_types, primary_class, random_model, small_config
from safetensors.torch import load_file
from samples import same_bits
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

import hf_stream
from hf_stream.layouts import from_transformers


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.enable_progress_bar()


@pytest.mark.parametrize("part", range(8) if os.environ.get("SWEEP") == "all" else (0,))
def test_every_conversion_is_a_layout_with_a_way_back(part: int, tmp_path: Path) -> None:
    outcomes = {}
    for model_type in model_types()[part::8]:
        for cls in _classes(model_type):
            if not _may_convert(cls.config_class, cls):
                continue
            folder = tmp_path / f"{model_type}-{cls.__name__}"
            outcome = _fare(model_type, cls, folder)
            if outcome is not None:
                outcomes[folder.name] = outcome
            gc.collect()
    print(*(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    assert outcomes
    assert not [name for name, outcome in outcomes.items() if outcome not in ("identical", "transformers fails")]


def _classes(model_type: str) -> list[type[PreTrainedModel]]:
    """The class with a head and the base model; those that are there and need no package that is not."""
    found = []
    for get in (lambda: primary_class(model_type), lambda: AutoModel._model_mapping[CONFIG_MAPPING[model_type]]):
        try:
            classes = get()
        except (ImportError, AttributeError, KeyError, ValueError):
            continue
        found += classes if isinstance(classes, tuple) else [classes]
    # A class whose packages are not there has a placeholder, which is no model class.
    return [cls for cls in dict.fromkeys(found) if cls is not None and issubclass(cls, PreTrainedModel)]


def _fare(model_type: str, cls: type[PreTrainedModel], folder: Path) -> str | None:
    """How a model fares; None if it has no conversions or transformers does not build it."""
    try:
        model = random_model(cls, small_config(model_type, cls))
    except Exception:  # noqa: BLE001 - transformers' own, of whatever kind
        return None
    registered = get_model_conversion_mapping(model, add_legacy=False)
    if not any(isinstance(entry, WeightConverter) for entry in registered):
        return None
    try:
        model.save_pretrained(folder / "a")
        plain = cls.from_pretrained(folder / "a")
        plain.save_pretrained(folder / "plain")
    except Exception:  # noqa: BLE001 - likewise
        return "transformers fails"
    try:
        return next(_differences(cls, plain, folder), "identical")
    except hf_stream.HfStreamError as error:
        return str(error)


def _differences(cls: type[PreTrainedModel], plain: PreTrainedModel, folder: Path) -> Iterator[str]:
    state = {name: tensor for name, tensor in plain.state_dict().items() if isinstance(tensor, torch.Tensor)}
    config = cls.config_class.from_pretrained(folder / "a")
    layout, of_the_model = from_transformers(config), from_transformers(plain)
    checkpoint = hf_stream.open_checkpoint(folder / "a")
    for name, forward in (("config", layout), ("model", of_the_model)):
        held = forward(checkpoint)
        if list(held) != list(state):
            yield f"{name}: other names, {sorted(set(held) ^ set(state))[:4]}"
        for key, tensor in hf_stream.materialize(held).items():
            if not same_bits(tensor, state[key]):
                yield f"{name}: '{key}' is another"
    hf_stream.convert(folder / "a", folder / "b", layout=layout)
    cls(config).load_state_dict(load_file(folder / "b" / "model.safetensors"))
    hf_stream.convert(folder / "b", folder / "c", layout=layout.inverse)
    if (folder / "a" / "model.safetensors").read_bytes() != (folder / "c" / "model.safetensors").read_bytes():
        yield f"back: {hf_stream.verify(folder / 'a', folder / 'c')}"
    if difference := hf_stream.verify(of_the_model.inverse(state), folder / "plain"):
        yield f"back from the model: {difference}"


def _may_convert(config_class: type[PreTrainedConfig], cls: type[PreTrainedModel]) -> bool:
    """Whether a model, or one inside it, is among those that conversions are registered for."""
    known, todo = {cls.__name__}, [config_class]
    while todo:
        config = todo.pop()
        if config.model_type in known:
            continue
        known.add(config.model_type)
        module = config.__module__.replace(".configuration_", ".modeling_")
        if ".modeling_" in module and importlib.util.find_spec(module) is not None:
            known.update(vars(importlib.import_module(module)))
        todo.extend(sub for sub in config.sub_configs.values() if hasattr(sub, "model_type"))
        if any(not hasattr(sub, "model_type") for sub in config.sub_configs.values()):
            return True  # any model may be inside
    return any(
        isinstance(entry, WeightConverter) for name in known for entry in get_checkpoint_conversion_mapping(name) or ()
    )
