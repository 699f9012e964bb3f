"""`from_pretrained`, streaming: transformers gets lazies, and what it has placed in the model is read at the end.

Transformers resolves files, builds the model, renames, converts, casts, assigns devices and reports, all as ever, but
the tensors it handles are not loaded. Only then is every parameter read, in parallel, straight to its place. The one
place where this hooks in is `PreTrainedModel._load_pretrained_model`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_utils import _is_on_hf_mount, load_state_dict

from hf_stream.checkpoint import AnyLayout, apply_layout, open_files
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.errors import LayoutError
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.shared import Shared
from hf_stream.integrations.transformers.hooks import Request, asking, hooked
from hf_stream.layouts.transformers_engine import no_bars, no_thread_pool
from hf_stream.lazy import LazyTensor, materialize

Loader = Callable[..., Any]
Model = TypeVar("Model", covariant=True)


class Pretrained(Protocol[Model]):
    """A class with `from_pretrained`: a model class or an Auto class."""

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Model: ...


def from_pretrained(
    cls: Pretrained[Model],
    pretrained_model_name_or_path: str | os.PathLike[str] | None,
    *args: Any,
    layout: AnyLayout | None = None,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
    **kwargs: Any,
) -> Model:
    """`cls.from_pretrained(...)`, reading each parameter straight to its place in its final dtype and layout.

    The model is the one that plain transformers gives, bit for bit. Anonymous memory beyond it stays below
    `buffer_size` plus the inputs of one deferred operation. On the CPU, parameters that lie in the files just as they
    are needed are private mappings of the files, as in transformers.

    Args:
        cls: A model class or an Auto class of transformers.
        pretrained_model_name_or_path: As in transformers, like all further arguments.
        layout: Maps the checkpoint's names and tensors to those that the model would have in its own checkpoint;
            transformers' conversions for the architecture then run on the result.
        buffer_size: Bytes in flight, at most.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        What `cls.from_pretrained` returns.

    Raises:
        LayoutError: The layout does not fit the checkpoint, or cannot be combined with the other arguments.
        FormatError, CheckpointError, CopyError: The files cannot be used or read.

    >>> model = hf_stream.from_pretrained(AutoModelForCausalLM, "org/repo", dtype="auto")  # doctest: +SKIP
    """
    with streamed_loads(), asking(Request(layout, buffer_size=buffer_size, progress=progress)):
        return cls.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


def stream_load(
    load: Loader,
    request: Request,
    model: PreTrainedModel,
    state_dict: Mapping[str, torch.Tensor] | None,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    expected_keys: list[str] | None = None,
) -> Any:
    """Run transformers' `_load_pretrained_model` (`load`) on lazies, and read what it has placed in the model."""
    obstacle = _obstacle(load_config)
    if obstacle is not None:
        if request.layout is not None:
            raise LayoutError(
                f"a layout cannot be combined with {obstacle}; convert the checkpoint first, with hf_stream.convert"
            )
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)
    with collector_paused():
        tensors = apply_layout(request.layout, _open(state_dict, checkpoint_files, load_config))
    with asking(None), collector_paused(), no_bars(), no_thread_pool():
        result = load(model, tensors, checkpoint_files, load_config, expected_keys)
    materialize_model(model, request, alias=_may_map(checkpoint_files or (), load_config))
    return result


def materialize_model(model: nn.Module, request: Request, *, alias: bool) -> None:
    """Read every lazy parameter and buffer of a model, in parallel, and put the real ones in their places.

    Args:
        model: The model.
        request: How to read.
        alias: Whether those that lie in a file just as they are may be mappings of it.
    """
    places: list[tuple[dict[str, Any], str, LazyTensor]] = [
        (slots, name, tensor)
        for module in model.modules()
        for slots in (module._parameters, module._buffers)
        for name, tensor in slots.items()
        if isinstance(tensor, LazyTensor)
    ]
    reals = materialize(
        [tensor for _, _, tensor in places],
        buffer_size=request.buffer_size,
        progress=request.progress,
        desc="Loading",
        alias=alias,
    )
    for (slots, name, _), real in zip(places, reals, strict=True):
        slots[name] = real


def _open(
    state_dict: Mapping[str, torch.Tensor] | None, checkpoint_files: Sequence[str] | None, load_config: Any
) -> Mapping[str, torch.Tensor]:
    if state_dict is not None:
        return {name: LazyTensor.from_tensor(tensor) for name, tensor in state_dict.items()}
    files = checkpoint_files or []
    if files and all(file.endswith(".safetensors") for file in files):
        # One by one: of a name in two files, transformers takes the last.
        opened = (open_files(load_config.pretrained_model_name_or_path or file, [file]) for file in files)
        return {name: tensor for checkpoint in opened for name, tensor in checkpoint.items()}
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        # As in transformers, whatever `weights_only` says: no pickle is executed.
        loaded.update(load_state_dict(file, disable_mmap=load_config.disable_mmap))
    return {name: LazyTensor.from_tensor(tensor) for name, tensor in loaded.items()}


def _may_map(checkpoint_files: Sequence[str], load_config: Any) -> bool:
    """Whether transformers would leave these files mapped."""
    return not (load_config.disable_mmap or any(map(_is_on_hf_mount, checkpoint_files)))


def _obstacle(load_config: Any) -> str | None:
    """What in a load needs real tensors on the way, in words; None if nothing does."""
    if load_config.hf_quantizer is not None:
        return "a quantized model"
    if "disk" in (load_config.device_map or {}).values():
        return "offloading to disk"
    if load_config.device_mesh is not None:
        return "a device mesh"
    if is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        return "DeepSpeed ZeRO-3"
    return None


streamed_loads = Shared(lambda: hooked("_load_pretrained_model", stream_load))
