"""The layout between the checkpoint of a transformers model and the tensors that it holds, and the way back."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.modeling_utils import remove_tied_weights_from_state_dict, unwrap_model

from hf_stream.checkpoint.config import config_of
from hf_stream.errors import LayoutError
from hf_stream.layouts.composable import Composable
from hf_stream.layouts.transformers_engine import emptied, load_into_skeleton, revert, skeleton
from hf_stream.layouts.transformers_misfits import Misfits

Tensors = Mapping[str, torch.Tensor]


def layout_of(model_or_config: object, *, strict: bool) -> ToMemory:
    """See `from_transformers`."""
    if isinstance(model_or_config, str | os.PathLike):
        model_or_config = config_of(model_or_config)
    if isinstance(model_or_config, Mapping):
        model_or_config = typed_config(model_or_config)
    if isinstance(model_or_config, PreTrainedConfig):
        config = copy.deepcopy(model_or_config)
        return ToMemory(class_of(config), config, None, strict)
    model: Any = unwrap_model(model_or_config) if isinstance(model_or_config, torch.nn.Module) else model_or_config
    if not isinstance(model, PreTrainedModel):
        raise LayoutError(f"from_transformers takes a model of transformers or a config, got {type(model).__name__}.")
    if getattr(model, "hf_quantizer", None) is not None:
        raise LayoutError(
            f"{type(model).__name__} is quantized, and holds other tensors than its class and config say. "
            "Give the config of the model without quantization."
        )
    used = getattr(model, "_weight_conversions", None)
    return ToMemory(
        type(model), model.config, None if used is None else tuple(copy.deepcopy(used)), strict, emptied(model)
    )


@dataclass(frozen=True, repr=False)
class ToMemory(Composable):
    """From the tensors of a checkpoint to those that the model holds.

    Attributes:
        model_class: The class of the model.
        config: Its config.
        used: The conversions that it was loaded with, which saving undoes; None if it was not loaded.
        strict: Whether every weight must be there, and nothing else.
        likeness: The model on the meta device, where one was given: its modules may not be those of its config.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    used: tuple[WeightTransform, ...] | None
    strict: bool
    likeness: PreTrainedModel | None = None

    def __call__(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors as the model holds them.

        Raises:
            LayoutError: Weights are missing, unexpected, or of another shape; says which.
        """
        model: Any = self.skeleton()
        conversions = self._conversions(model)
        slots = slots_of(model)
        info = load_into_skeleton(model, tensors, conversions)
        loaded = {name: slot.detach() for name, slot in slots_of(model).items() if slot is not slots[name]}
        for names in tied(slots):
            found = [name for name in names if name in loaded]
            loaded.update({name: loaded[found[0]] for name in names if found and name not in found})
        failed = {name for name, *_ in info.mismatched_keys} | set(info.conversion_errors)
        failed = failed.union(*(names for names in tied(slots) if failed.intersection(names)))
        info.missing_keys = set(slots) - set(loaded) - failed
        model._adjust_missing_and_unexpected_keys(info)
        misfits = Misfits(model, slots, tensors)
        misfits.add_shapes({name: tuple(got) for name, got, _ in info.mismatched_keys})
        misfits.add_errors(info.conversion_errors)
        if self.strict:
            misfits.add_missing(info.missing_keys)
            misfits.add_unexpected(info.unexpected_keys, conversions)
        misfits.check()
        return {name: loaded[name] for name in slots if name in loaded}

    @property
    def inverse(self) -> ToCheckpoint:
        return ToCheckpoint(self)

    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device, to be saved as what it was loaded from."""
        model = skeleton(self.model_class, self.config) if self.likeness is None else emptied(self.likeness)
        vars(model)["_weight_conversions"] = None if self.used is None else list(copy.deepcopy(self.used))
        return model

    def _conversions(self, model: PreTrainedModel) -> list[WeightTransform]:
        """What `from_pretrained` does to names and shapes: first the renamings that it was given for this one model."""
        registered: list[WeightTransform] = get_model_conversion_mapping(model)
        known = {_patterns(entry) for entry in registered}
        own = [entry for entry in self.used or () if type(entry) is WeightRenaming and _patterns(entry) not in known]
        return copy.deepcopy(own) + registered

    def __repr__(self) -> str:
        return f"from_transformers({self.model_class.__name__}{'' if self.strict else ', strict=False'})"


@dataclass(frozen=True, repr=False)
class ToCheckpoint(Composable):
    """The way back: from the tensors that the model holds to those that transformers saves."""

    origin: ToMemory

    def __call__(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors as transformers saves them.

        Raises:
            LayoutError: Weights are missing, unexpected, or of another shape; says which.
        """
        model = self.origin.skeleton()
        slots = slots_of(model)
        ignored = set(model._keys_to_ignore_on_save or ())
        known = {name: tensor for name, tensor in tensors.items() if name in slots}
        groups = tied(slots)
        spare = ignored.union(*(names for names in groups if any(name in known for name in names)))
        misfits = Misfits(model, slots, tensors)
        misfits.add_shapes({name: tuple(t.shape) for name, t in known.items() if t.shape != slots[name].shape})
        if self.origin.strict:
            misfits.add_missing(set(slots) - set(known) - spare)
            misfits.add_unexpected(set(tensors) - set(known))
        misfits.check()
        kept = {name: known[name].detach() for name in slots if name in known and name not in ignored}
        # transformers knows tied weights by their memory; here they share it by name.
        memory = {name: torch.empty(1) for name in kept}
        for names in groups:
            memory.update(dict.fromkeys((name for name in names if name in kept), torch.empty(1)))
        untied = remove_tied_weights_from_state_dict(memory, model)
        return revert(model, {name: kept[name] for name in untied})

    @property
    def inverse(self) -> ToMemory:
        return self.origin

    def __repr__(self) -> str:
        return f"{self.origin!r}.inverse"


def slots_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, the objects themselves."""
    state = model.state_dict(keep_vars=True)
    return {name: slot for name, slot in state.items() if isinstance(slot, torch.Tensor)}


def tied(slots: Tensors) -> list[list[str]]:
    """Groups of names that stand for one weight."""
    names: dict[int, list[str]] = {}
    for name, slot in slots.items():
        names.setdefault(id(slot), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _patterns(entry: WeightTransform) -> tuple[Any, ...]:
    # Not the original ones: transformers changes them in place when it saves.
    return (*entry.source_patterns, "->", *entry.target_patterns, entry.scope_prefix)


def typed_config(content: Mapping[str, Any]) -> PreTrainedConfig:
    """The config that a config.json holds.

    Raises:
        LayoutError: Transformers does not know its type.
    """
    model_type: Any = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise LayoutError(
            f"transformers does not know the model_type {model_type!r} of the config. "
            "Load the model with its own code, and give the model."
        )
    # JSON has no infinities: transformers writes them in a way of its own.
    decoded = PreTrainedConfig._decode_special_floats(dict(content))
    config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(decoded)
    return config


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of the model that a config is of: the first of its architectures, or else the base model.

    Raises:
        LayoutError: Transformers has no such class.
    """
    names: Any = config.architectures
    if names:
        name = names[0] if isinstance(names, list | tuple) and isinstance(names[0], str) else ""
        found = getattr(transformers, name, None) or getattr(_module_beside(type(config)), name, None)
        # The config may come from anywhere, and transformers has much else that can be called.
        if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
            raise LayoutError(
                f"transformers has no model {name or names!r}, the architecture that the config names. Give the model."
            )
        return found
    if type(config) not in AutoModel._model_mapping:
        raise LayoutError(f"the config of a '{config.model_type}' names no architecture. Set config.architectures.")
    base: Any = AutoModel._model_mapping[type(config)]
    return cast("type[PreTrainedModel]", base[0] if isinstance(base, (tuple, list)) else base)


def _module_beside(config_class: type[PreTrainedConfig]) -> ModuleType | None:
    """Where the models of a config are: transformers does not export every part of every model."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    return importlib.import_module(name) if name.startswith("transformers.") and ".modeling_" in name else None
