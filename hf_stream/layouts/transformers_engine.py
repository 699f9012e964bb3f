"""transformers' own conversions, run on tensors that are not loaded: quick, and without a word.

What happens here is symbolic and done in no time, so it needs neither transformers' threads nor its progress bars.
Imported by those who have transformers, and by nobody else.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import EllipsisType
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.loading_report import LoadStateDictInfo
from transformers.utils.logging import set_tqdm_hook

from hf_stream.formats.collector import collector_paused
from hf_stream.formats.shared import Shared
from hf_stream.layouts.transformers_speed import little_work_per_key


@Shared
@contextmanager
def no_bars() -> Iterator[None]:
    """Run a block in which transformers shows no bars; ours count the bytes."""
    before = set_tqdm_hook(_disabled)
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _disabled(factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return factory(*args, **{**kwargs, "disable": True})


@Shared
@contextmanager
def no_thread_pool() -> Iterator[None]:
    """Transformers' loading threads have nothing to wait for here, and slow symbolic work down."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def quietly() -> Iterator[None]:
    """Run a block in which transformers handles lazies: no bars, no threads, no collections of garbage."""
    with collector_paused(), no_bars(), no_thread_pool(), little_work_per_key():
        yield


# Models with code of their own may look at values while they are made, which transformers allows for.
_creating = Shared(meta_device_safe_creation_ops)


def skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the meta device, which takes no memory; `config` is left as it is."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # which needs no other package, and no GPU
    with torch.device("meta"), _creating():
        return model_class(config)


def emptied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model on the meta device, with the modules and ties that it has now, whatever its config says."""
    copies: dict[int, Any] = {}

    def on_meta(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in copies:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            parameter = isinstance(tensor, torch.nn.Parameter)
            copies[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        found: torch.Tensor = copies[id(tensor)]
        return found

    def copied(module: torch.nn.Module | None) -> torch.nn.Module | None:
        if module is None:
            return None
        if id(module) not in copies:
            # Neither copy nor deepcopy: modules may forbid them, or hold what cannot be copied.
            made = copies[id(module)] = object.__new__(type(module))
            # Hooks on what a copy never does may hold the module itself, and its weights with it.
            kept = {k: v for k, v in vars(module).items() if not k.endswith("_hooks") or k.startswith("_state_dict")}
            hooks: dict[str, Any] = {name: OrderedDict() for name in vars(module).keys() - kept.keys()}
            vars(made).update(kept | hooks)
            vars(made)["_parameters"] = {name: on_meta(tensor) for name, tensor in module._parameters.items()}
            vars(made)["_buffers"] = {name: on_meta(tensor) for name, tensor in module._buffers.items()}
            vars(made)["_modules"] = {name: copied(child) for name, child in module._modules.items()}
        found: torch.nn.Module = copies[id(module)]
        return found

    made: Any = copied(model)
    vars(made)["config"] = copy.deepcopy(model.config)
    return cast("PreTrainedModel", made)


def load_into_skeleton(
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    conversions: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    dtype_plan: Mapping[str, torch.dtype] | None = None,
    heard: dict[str, torch.dtype] | None = None,
) -> LoadStateDictInfo:
    """Have transformers place a checkpoint's tensors in a model on the meta device, in the dtypes that they have.

    Args:
        model: The model.
        tensors: The tensors.
        conversions: What is done to names and shapes.
        dtype: That of the model.
        dtype_plan: What transformers keeps in another dtype.
        heard: Takes the dtype that transformers asks for, of each tensor that it places.

    Returns:
        What transformers says about names and shapes, before it has looked at ties and at what may be ignored.
    """
    heard = {} if heard is None else heard
    as_they_are = {name: _AsItIs(name, tensor, heard) for name, tensor in tensors.items()}
    settings = LoadStateDictConfig(weight_mapping=list(conversions), dtype=dtype, dtype_plan=dict(dtype_plan or {}))
    with quietly():
        info: LoadStateDictInfo
        info, _ = convert_and_load_state_dict_in_model(model, as_they_are, settings)
    return info


def revert(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors as transformers saves them, its conversions undone."""
    with quietly():
        reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return reverted


class _AsItIs:
    """Stands for a tensor of a file, as safetensors' slices do; of dtypes it takes note, and stays as it is."""

    def __init__(self, name: str, tensor: torch.Tensor, heard: dict[str, torch.dtype]) -> None:
        self._name = name
        self._tensor = tensor
        self._heard = heard

    def __getitem__(self, _: EllipsisType) -> _AsItIs:
        return self

    def to(self, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        if dtype is not None:
            self._heard[self._name] = dtype
        # Another object for the same data: transformers hangs attributes on it.
        return self._tensor.detach()
