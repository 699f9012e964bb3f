"""Which tensors of a checkpoint transformers keeps in a dtype of their own when a model is loaded in another."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import local_torch_dtype

from hf_stream.layouts.transformers_engine import load_into_skeleton, skeleton
from hf_stream.layouts.transformers_layout import class_of, slots_of, typed_config

# In others torch makes no models.
_OF_MODELS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtypes_of(
    content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """See `own_dtypes`.

    Raises:
        Exception: Whatever the config or the model says against being built.
    """
    if dtype not in _OF_MODELS:
        return {}
    config = copy.deepcopy(typed_config(content))
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    with local_torch_dtype(dtype):
        model = skeleton(class_of(config), config)
    plan = model._get_dtype_plan(dtype)
    if not plan and all(slot.dtype == dtype for slot in slots_of(model).values() if slot.is_floating_point()):
        return {}
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    heard: dict[str, torch.dtype] = {}
    load_into_skeleton(model, floating, get_model_conversion_mapping(model), dtype=dtype, dtype_plan=plan, heard=heard)
    # What would become a whole number stays as it is.
    own = {name: found if found.is_floating_point else tensors[name].dtype for name, found in heard.items()}
    return {name: found for name, found in own.items() if found != dtype}
