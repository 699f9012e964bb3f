"""What `dtype=` does to a checkpoint: which types it may be, and which tensors keep one of their own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_stream.checkpoint.carried import read_config
from hf_stream.checkpoint.mapping import AnyLayout, config_after
from hf_stream.checkpoint.open import Checkpoint
from hf_stream.checkpoint.quantized import check_castable
from hf_stream.errors import ArgumentError
from hf_stream.formats.dtypes import CAST_TARGETS, as_dtype
from hf_stream.lazy import reads
from hf_stream.storage.base import Storage

Tensors = Mapping[str, torch.Tensor]
OwnDtypes = Callable[[Mapping[str, Any], Tensors, torch.dtype], Mapping[str, torch.dtype]]
"""From the content of a config.json, its checkpoint's tensors and `dtype=` to those dtypes that are others, by name."""

# Checkpoints know nothing of models: the layer that does puts itself here.
_models: list[OwnDtypes] = []


def ask_for_dtypes(model: OwnDtypes) -> None:
    """Have this called whenever a checkpoint with a config is cast."""
    _models.append(model)


def cast_target(dtype: torch.dtype | str) -> torch.dtype:
    """What weights are cast to, by the type or its name; refuses what they cannot be cast to.

    Raises:
        ArgumentError: It holds no weights: 300 as int8 is 44. Or it is a name that is not known.
        ArgumentTypeError: It is neither a dtype nor a name.
    """
    dtype = as_dtype(dtype)
    if dtype not in CAST_TARGETS:
        raise ArgumentError(
            f"dtype= is {dtype}, and weights cast to that would be lost; pass a floating-point type, such as "
            "torch.bfloat16 (to quantize a model, load it with a quantization_config of transformers, and save it)"
        )
    return dtype


def cast(tensors: Tensors, dtype: torch.dtype, source: Checkpoint, layout: AnyLayout | None) -> dict[str, torch.Tensor]:
    """What a layout has made of a checkpoint, its floating-point tensors as `dtype`, or as their model wants them.

    Raises:
        CheckpointError: The tensors are quantized, or the config beside the checkpoint is no JSON.
    """
    config = read_config(source.directory)
    after = None if config is None else config_after(layout, config)
    check_castable(source.path, tensors, after, converted=layout is not None)
    own: dict[str, torch.dtype] = {}
    for model in _models:
        own.update({} if config is None else model(config, source, dtype))
    if own and layout is not None:
        own = _inherited(own, source, tensors)
    return {
        name: tensor.to(own.get(name, dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _inherited(own: Mapping[str, torch.dtype], before: Tensors, after: Tensors) -> dict[str, torch.dtype]:
    """The dtypes of those results that are made of nothing but tensors which have one of their own, by new names."""
    places: dict[Storage, list[tuple[int, int, torch.dtype]]] = {}
    for name, dtype in own.items():
        for region in reads([before[name]]):
            places.setdefault(region.storage, []).append((*region.span, dtype))
    for spans in places.values():
        spans.sort(key=lambda place: place[0])
    inherited = {}
    for name, tensor in after.items():
        dtypes = {_dtype_at(places.get(region.storage, []), region.offset) for region in reads([tensor])}
        found = dtypes.pop() if len(dtypes) == 1 else None
        if found is not None:
            inherited[name] = found
    return inherited


def _dtype_at(places: list[tuple[int, int, torch.dtype]], offset: int) -> torch.dtype | None:
    number = bisect_right(places, offset, key=lambda place: place[0]) - 1
    return places[number][2] if number >= 0 and offset < places[number][1] else None
