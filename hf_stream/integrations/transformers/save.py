"""`save_pretrained`, streaming: transformers writes the small files and says what the weights are; we write them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from huggingface_hub import get_torch_storage_id, get_torch_storage_size
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict, unwrap_model

from hf_stream.checkpoint import AnyLayout, apply_layout
from hf_stream.checkpoint.files import CheckpointFiles
from hf_stream.checkpoint.save import write_files
from hf_stream.checkpoint.staging import Staging
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.errors import CheckpointError, LayoutError
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.shards import SAFE_WEIGHTS, SAFE_WEIGHTS_INDEX, add_variant, shard_pattern
from hf_stream.formats.shared import Shared
from hf_stream.integrations.transformers.hooks import Request, asking, hooked
from hf_stream.layouts.transformers_engine import no_bars
from hf_stream.lazy import LazyTensor


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    layout: AnyLayout | None = None,
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    save_original_format: bool = True,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
    **kwargs: Any,
) -> None:
    """`model.save_pretrained(...)`, writing each tensor straight from the model's memory to its place in its file.

    The files are those of plain transformers, byte for byte (tensors that a conversion splits may be spread over shards
    in another way). A new directory appears complete or not at all; in one that exists, no mixture of old and new ever
    loads. Models with adapters, quantized or offloaded ones, ones sharded over ranks, and saves that push to the Hub
    are handed to transformers.

    Args:
        model: The model.
        save_directory: Where to save; like all arguments not named here, as in transformers.
        layout: Maps the tensors that transformers would save to those to save; often the inverse of the layout that the
            model was loaded with, which is the default if the model knows that one (from a `StreamingMixin`).
        save_original_format: Whether transformers' own conversions for the architecture are reverted first.
        buffer_size: Bytes in flight, at most.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Raises:
        LayoutError: The layout does not fit the model, or cannot be combined with this kind of model.
        CheckpointError: No space, the destination cannot be used, or something to save is no tensor.
        CopyError: Writing failed. The destination is as it was.
    """
    with streamed_saves(), asking(Request(saved_through=layout, buffer_size=buffer_size, progress=progress)):
        model.save_pretrained(
            save_directory,
            is_main_process=is_main_process,
            state_dict=state_dict,
            max_shard_size=max_shard_size,
            variant=variant,
            save_original_format=save_original_format,
            **kwargs,
        )


def stream_save(
    save: Callable[..., None],
    request: Request,
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    token: str | bool | None = None,
    save_peft_format: bool = True,
    save_original_format: bool = True,
    **kwargs: Any,
) -> None:
    """Have transformers' `save_pretrained` (`save`) write all but the weights, and write those."""
    options = {
        "push_to_hub": push_to_hub,
        "max_shard_size": max_shard_size,
        "variant": variant,
        "token": token,
        "save_peft_format": save_peft_format,
        "save_original_format": save_original_format,
        **kwargs,
    }
    layout = _layout(request, model, save_original_format)
    obstacle = _obstacle(model, options)
    if obstacle is not None:
        if layout is not None:
            raise LayoutError(f"a layout cannot be combined with {obstacle}; save, then use hf_stream.convert")
        with asking(None):
            save(model, save_directory, is_main_process, state_dict, **options)
        return
    if not is_main_process:
        return
    model = unwrap_model(model)
    staging = Staging(save_directory)
    try:
        # Without tensors to save, transformers writes all that goes with them.
        with asking(None), no_bars():
            save(model, staging.path, state_dict={}, **options)
        with collector_paused():
            tensors, sizes, groups = _saved_tensors(model, state_dict, save_original_format)
            if layout is not None:
                tensors, sizes, groups = apply_layout(layout, tensors), {}, {}
            files = CheckpointFiles.plan(
                tensors,
                max_shard_size=max_shard_size,
                pattern=shard_pattern(add_variant(SAFE_WEIGHTS, variant)),
                index=add_variant(SAFE_WEIGHTS_INDEX, variant),
                index_metadata={"total_parameters": model.num_parameters()},
                sizes=sizes,
                groups=groups,
            )
    except BaseException:
        staging.abandon()
        raise
    write_files(staging, files, tensors, buffer_size=request.buffer_size, progress=request.progress)


streamed_saves = Shared(lambda: hooked("save_pretrained", stream_save))


def _layout(request: Request, model: Any, save_original_format: bool) -> AnyLayout | None:
    """What to map the tensors through: as asked, or back through the layout that loads them."""
    if request.saved_through is not None or request.layout is None or not save_original_format:
        return request.saved_through
    if inspect.getattr_static(request.layout, "inverse", None) is None:
        raise LayoutError(
            f"the layout of {type(model).__name__} is a plain function, which has no inverse; "
            "make it a Layout, or pass save_original_format=False to save the tensors as the model holds them"
        )
    inverse: AnyLayout = request.layout.inverse  # type: ignore[attr-defined]
    return inverse


def _saved_tensors(
    model: Any, state_dict: Mapping[str, torch.Tensor] | None, save_original_format: bool
) -> tuple[dict[str, torch.Tensor], dict[str, int], dict[str, Hashable]]:
    """The tensors that transformers would save, lazily, and what it would take for their sizes and storages.

    A tensor counts with the storage under it when transformers spreads tensors over shards; one that a conversion makes
    counts as itself.
    """
    reals = dict(model.state_dict() if state_dict is None else state_dict)
    for name in model._keys_to_ignore_on_save or ():
        reals.pop(name, None)
    # Like transformers, which leaves texts out.
    reals = {name: tensor for name, tensor in reals.items() if not isinstance(tensor, str)}
    for name, tensor in reals.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"'{name}' is a {type(tensor).__name__} and no tensor; leave it out of state_dict=")
    reals = _without_tied(reals, model)
    lazies: dict[str, torch.Tensor] = {name: LazyTensor.from_tensor(tensor) for name, tensor in reals.items()}
    names = {id(lazy): name for name, lazy in lazies.items()}
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(model, lazies) if save_original_format else lazies
    unchanged = {name: reals[names[id(lazy)]] for name, lazy in tensors.items() if id(lazy) in names}
    unchanged = {name: real for name, real in unchanged.items() if not isinstance(real, LazyTensor)}
    sizes: dict[str, int] = {name: get_torch_storage_size(real) for name, real in unchanged.items()}
    groups: dict[str, Hashable] = {name: get_torch_storage_id(real) for name, real in unchanged.items()}
    return tensors, sizes, groups


def _without_tied(tensors: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """What is left when transformers has removed tied weights, which it knows by their storages.

    Lazies have none: a small tensor stands in for all that show the same.
    """
    stand_ins: dict[Hashable, torch.Tensor] = {}
    looked_at = {
        name: stand_ins.setdefault(tensor.identity, torch.empty(1)) if isinstance(tensor, LazyTensor) else tensor
        for name, tensor in tensors.items()
    }
    kept: dict[str, torch.Tensor] = remove_tied_weights_from_state_dict(looked_at, model)
    return {name: tensors[name] if isinstance(tensors[name], LazyTensor) else kept[name] for name in kept}


def _obstacle(model: Any, kwargs: Mapping[str, Any]) -> str | None:
    """What makes a model one that transformers has to save itself, in words; None if nothing does."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return "adapters"
    if getattr(model, "hf_quantizer", None) is not None:
        return "a quantized model"
    if {"cpu", "disk"} & set(getattr(model, "hf_device_map", {}).values()):
        return "an offloaded model"
    if kwargs.get("distributed_checkpoint") or getattr(model.config, "distributed_config", None) is not None:
        return "a model that is sharded over ranks"
    if kwargs.get("push_to_hub"):
        return "push_to_hub"
    return None
