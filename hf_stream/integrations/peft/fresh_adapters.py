"""Adapters that were made while their base had no data, created anew by PEFT now that it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from hf_stream.errors import CheckpointError
from hf_stream.layouts.lora_adapter import listed
from hf_stream.lazy import dressed


def create_anew(model: PeftModel) -> None:
    """Have PEFT create every adapter that is on the meta device, in its dtypes and as trainable as it was.

    Raises:
        CheckpointError: An adapter cannot be created anew.
    """
    before = {name: tensor for name, tensor in _named_tensors(model) if tensor.is_meta}
    if not before:
        return
    _copy_originals(model)
    tuner = model.base_model
    if isinstance(tuner, BaseTuner):
        for adapter in model.peft_config:
            if any(f".{adapter}." in f"{name}." for name in before):
                _forget(tuner.model, adapter)
                try:
                    # Some kinds of adapters begin with what the base's weights are.
                    tuner.inject_adapter(tuner.model, adapter)
                except (NotImplementedError, ValueError) as error:
                    raise CheckpointError(
                        f"adapter '{adapter}' ({model.peft_type}) cannot be created anew after its base has been "
                        f"loaded: {error}; load the base with from_pretrained, and wrap it then"
                    ) from error
    for name, tensor in _named_tensors(model):
        if name in before:
            # PEFT makes adapters in the dtype of the base first, and then holds them in another one.
            tensor.data = tensor.data.to(before[name].dtype)
            tensor.requires_grad_(before[name].requires_grad)
    left = [name for name, tensor in _named_tensors(model) if tensor.is_meta]
    if left:
        raise CheckpointError(
            f"{listed(left)} of an adapter are on the meta device still; create the adapter outside of "
            "torch.device('meta'), or after the base model has been loaded"
        )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _copy_originals(model: nn.Module) -> None:
    """Modules that are trained as a whole begin as copies of those of the base."""
    copies: dict[int, torch.Tensor] = {}
    for wrapper in model.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            originals = dict(_named_tensors(wrapper.original_module))
            for module in wrapper.modules_to_save.values():
                for name, tensor in list(_named_tensors(module)):
                    if tensor.is_meta and name in originals:
                        # Tied ones are copied once.
                        if id(tensor) not in copies:
                            copies[id(tensor)] = dressed(originals[name].detach().clone(), tensor)
                        owner, _, leaf = name.rpartition(".")
                        setattr(module.get_submodule(owner), leaf, copies[id(tensor)])


def _forget(base: nn.Module, adapter: str) -> None:
    """Take an adapter's weights out of all layers; which adapters are active stays as it is."""
    for module in base.modules():
        if isinstance(module, BaseTunerLayer):
            for attribute in (*module.adapter_layer_names, *module.other_param_names):
                held: Any = getattr(module, attribute, None)
                if hasattr(held, "__delitem__") and adapter in held:
                    del held[adapter]
        elif isinstance(module, TrainableTokensWrapper):
            module._adapters.discard(adapter)
