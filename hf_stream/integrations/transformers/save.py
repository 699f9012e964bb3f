"""`save_pretrained`, streaming: transformers writes the small files and says what the weights are; we write them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_stream.checkpoint import AnyLayout, apply_layout
from hf_stream.checkpoint.files import CheckpointFiles
from hf_stream.checkpoint.save import write_files
from hf_stream.checkpoint.staging import Staging
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.errors import ArgumentTypeError, LayoutError, WriteError, because_of
from hf_stream.formats import SAFE_WEIGHTS_INDEX, add_variant
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.shared import Shared
from hf_stream.integrations.transformers.hooks import Request, asking, hooked
from hf_stream.integrations.transformers.log_names import logged_as
from hf_stream.integrations.transformers.pushed import pushed
from hf_stream.integrations.transformers.recorded import Recording, recording
from hf_stream.layouts.composable import is_two_way
from hf_stream.layouts.transformers_engine import no_bars
from hf_stream.layouts.transformers_speed import little_work_per_key
from hf_stream.lazy.given import kind
from hf_stream.utils.sizes import nbytes_of


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    *args: Any,
    layout: AnyLayout | None = None,
    strict: bool = False,
    durable: bool | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
    **kwargs: Any,
) -> None:
    """`model.save_pretrained(...)`, writing each tensor straight from where it is to its place in its file.

    The files are those of plain transformers, byte for byte (tensors that a conversion splits may be spread over shards
    in another way). A new directory appears complete or not at all; in one that exists, old weights of the same name
    go, and no mixture of old and new ever loads. Offloaded weights are read from where they are offloaded to. Models
    that are sharded over ranks are handed to transformers. Of a `PeftModel` the adapters are saved, as peft does it.

    Args:
        model: The model.
        save_directory: Where to save; like all arguments not named here, as in transformers.
        layout: Maps the tensors that transformers would save to those to save; often the inverse of the layout that the
            model was loaded with, which is the default if the model knows that one (from a `StreamingMixin` or from an
            Auto class of hf_stream).
        strict: Whether a rule of the layout that finds nothing is an error, and not a warning.
        durable: Whether to wait until everything is on the disk, so that it outlives a loss of power. None: yes, unless
            the environment has HF_STREAM_DURABLE=0.
        buffer_size: Bytes in flight, at most, also as text such as "64MB".
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Raises:
        LayoutError: The layout does not fit the model, or cannot be combined with this kind of model.
        CheckpointError: No space, the destination cannot be used, or something to save is no tensor.
        CopyError: Writing failed. The destination is as it was.
    """
    nbytes = nbytes_of(buffer_size, "buffer_size")
    if not hasattr(model, "save_pretrained"):
        raise ArgumentTypeError(
            f"save_pretrained takes a model of transformers first, got {kind(model)}; for other modules, and for "
            "tensors, use hf_stream.save_checkpoint(module.state_dict(), directory)"
        )
    if layout is not None and not isinstance(model, PreTrainedModel):
        raise LayoutError(
            f"{type(model).__name__} is no model class of transformers and takes no layout; "
            "save its tensors with hf_stream.save_checkpoint"
        )
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        from hf_stream.integrations.peft import save_adapters

        save_adapters(model, save_directory, *args, durable=durable, buffer_size=nbytes, progress=progress, **kwargs)
        return
    request = Request(saved_through=layout, strict=strict, durable=durable, buffer_size=nbytes, progress=progress)
    with streamed_saves(), asking(request):
        model.save_pretrained(save_directory, *args, **kwargs)


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
    distributed_checkpoint: bool = False,
    *,
    durable: bool | None = None,
    buffer_size: int | str | None = None,
    progress: bool | Progress | None = None,
    **kwargs: Any,
) -> None:
    """Have transformers' `save_pretrained` (`save`) write all but the weights and name those, and write them."""
    if not isinstance(state_dict, Mapping | None):
        raise ArgumentTypeError(f"state_dict= is {kind(state_dict)}; pass a mapping of names to tensors")
    nbytes = nbytes_of(max_shard_size, "max_shard_size")
    options = {
        "max_shard_size": max_shard_size,
        "variant": variant,
        "save_peft_format": save_peft_format,
        "save_original_format": save_original_format,
    }
    request = request.changed(buffer_size, progress)
    layout = _layout(request, model, save_original_format)
    sharded = "a distributed checkpoint" if distributed_checkpoint else _sharded(model, state_dict)
    _check_layout_fits(layout, sharded or _own_format(model))
    if sharded is not None:
        options.update(push_to_hub=push_to_hub, token=token, distributed_checkpoint=distributed_checkpoint)
        options["max_shard_size"] = nbytes  # transformers does not know all that may be written here
        with asking(None):
            save(model, save_directory, is_main_process, state_dict, **options, **kwargs)
        return
    if not model.should_save_on_this_rank(is_main_process):
        _make_directory(save_directory)  # as transformers does
        return
    if layout is not None:
        # One file: what the layout makes of the tensors is spread over files afterwards.
        options["max_shard_size"] = sys.maxsize
    if state_dict is not None:
        # Transformers takes out of it what it has saved.
        state_dict = dict(state_dict)
    quantized = getattr(model, "hf_quantizer", None) is not None
    staging = Staging(save_directory, durable=request.durable if durable is None else durable)
    try:
        with pushed(model, save_directory, token=token, **kwargs) if push_to_hub else nullcontext():
            with asking(None), no_bars(), collector_paused(), little_work_per_key():
                with logged_as(staging.path, save_directory), recording(lazy=not quantized) as record:
                    save(model, staging.path, state_dict=state_dict, **options)
                files, tensors = _files(record, model, layout, request.strict, max_shard_size, variant)
            write_files(staging, files, tensors, buffer_size=request.buffer_size, progress=request.progress)
    finally:
        staging.abandon()


streamed_saves = Shared(lambda: hooked("save_pretrained", stream_save))


def _make_directory(directory: str | os.PathLike[str]) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        fact = f"cannot be made: {error.strerror}; save elsewhere, or remedy that"
        raise because_of(error, f"'{os.fspath(directory)}' {fact}", WriteError) from error


def _files(
    record: Recording,
    model: Any,
    layout: AnyLayout | None,
    strict: bool,
    max_shard_size: int | str,
    variant: str | None,
) -> tuple[CheckpointFiles, dict[str, torch.Tensor]]:
    """The weight files, as transformers has planned them or for what a layout has made of its tensors."""
    index = add_variant(SAFE_WEIGHTS_INDEX, variant)
    if layout is None:
        return record.files(index), record.tensors
    tensors = apply_layout(layout, record.tensors, config=model.config, strict=strict)
    files = CheckpointFiles.plan(
        tensors,
        max_shard_size=max_shard_size,
        pattern=record.pattern,
        index=index,
        index_metadata={"total_parameters": model.num_parameters()},
    )
    return files, tensors


def _layout(request: Request, model: Any, save_original_format: bool) -> AnyLayout | None:
    """What to map the tensors through: as asked, or back through the layout that loads them."""
    if request.saved_through is not None or request.layout is None or not save_original_format:
        return request.saved_through
    if getattr(model, "_hf_peft_config_loaded", False):
        # Adapters alone are saved, and as they are, by transformers too.
        return None
    if not is_two_way(request.layout):
        raise LayoutError(
            f"the layout of {type(model).__name__} is a plain function, which has no inverse; "
            "make it a Layout, or pass save_original_format=False to save the tensors as the model holds them"
        )
    return request.layout.inverse


def _check_layout_fits(layout: AnyLayout | None, obstacle: str | None) -> None:
    if layout is not None and obstacle is not None:
        raise LayoutError(
            f"a layout cannot be combined with {obstacle}; save without one, then use hf_stream.convert if that helps"
        )


def _sharded(model: Any, state_dict: Mapping[str, torch.Tensor] | None) -> str | None:
    """How a model is sharded over ranks, which transformers has to gather, in words; None if it is not."""
    if getattr(model.config, "distributed_config", None) is not None:
        return "a model that is sharded over ranks"
    tensors = model.parameters() if state_dict is None else state_dict.values()
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return "tensors that are sharded over ranks"
    if state_dict is None and is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        return "DeepSpeed ZeRO-3"
    return None


def _own_format(model: Any) -> str | None:
    """What gives a model's files a format of their own, in words; None if nothing does."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return "adapters"
    if getattr(model, "hf_quantizer", None) is not None:
        return "a quantized model"
    return None
