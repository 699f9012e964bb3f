"""Load a base model's checkpoint straight into a model that PEFT has wrapped already."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from hf_stream.checkpoint import AnyLayout
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.copying.region import Region
from hf_stream.errors import CheckpointError
from hf_stream.integrations.peft.fresh_adapters import create_anew
from hf_stream.integrations.transformers.hooks import Request
from hf_stream.integrations.transformers.load import load_as_requested
from hf_stream.layouts.lora_base_layers import BaseSlot, base_slots
from hf_stream.lazy import LazyTensor, dressed, materialize, write_into
from hf_stream.utils.sizes import nbytes_of

_LISTED = 5


def load_base_model(
    model: PeftModel,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    layout: AnyLayout | None = None,
    strict: bool = True,
    device: torch.device | str = "cpu",
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
    **kwargs: Any,
) -> None:
    """Stream a base model's checkpoint into a `PeftModel`, as if the model had been loaded first and then wrapped.

    The checkpoint is resolved, renamed and converted by transformers. Tensors that the model has already are filled
    where they are, in their dtypes and on their devices: optimizers keep seeing them. Those on the meta device are
    replaced by real ones. Adapters are left alone, but those on the meta device are created anew, as PEFT does it:
    with the same seed they are those of a model that was loaded first and then wrapped.

    A model that is built on the meta device needs no memory before it is loaded:

        >>> with torch.device("meta"):  # doctest: +SKIP
        ...     base = AutoModelForCausalLM.from_config(config)
        >>> model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))  # doctest: +SKIP
        >>> load_base_model(model, "org/base")  # doctest: +SKIP
        >>> model.load_adapter("org/adapter", "default")  # doctest: +SKIP

    Args:
        model: The wrapped model; its base is a model of transformers.
        pretrained_model_name_or_path: As in `from_pretrained` of transformers, like all further arguments.
        layout: Maps the checkpoint's tensors to those that the base model would have in its own checkpoint.
        strict: Whether weights that the checkpoint lacks, or has too many, are errors; otherwise transformers
            initialises the former and leaves the latter. Modules that the adapter trains as a whole may be missing.
            Likewise rules of the layout that find nothing.
        device: Where tensors go that were on the meta device.
        buffer_size: Bytes in flight, at most, also as "64MB"; the inputs of one deferred operation come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Raises:
        LayoutError: The layout does not fit the checkpoint.
        CheckpointError: Names or shapes do not fit, or the base is no model of transformers; nothing has been changed
            then. Also if an adapter on the meta device cannot be created anew.
        FormatError, CopyError: The files cannot be used or read.
    """
    base = model.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise CheckpointError(
            f"{type(base).__name__} is no model of transformers; use hf_stream.load_into with "
            "layouts.lora_base_layers(model), which names the tensors as the wrapped model does"
        )
    if "device_map" in kwargs:
        raise CheckpointError("the model has its devices already: pass device= for what is on the meta device")
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    request = Request(layout, strict=strict, buffer_size=buffer_size, progress=progress, lazily=True)
    kwargs = {"config": copy.deepcopy(base.config), **kwargs, "output_loading_info": True}
    found: Any = load_as_requested(request, type(base), pretrained_model_name_or_path, **kwargs)
    plain, info = found
    slots = list(base_slots(model))
    loaded = _tensors(plain)
    _check_fit(type(base).__name__, slots, loaded, info if strict else {})
    _fill(slots, loaded, torch.device(device), buffer_size, progress)
    create_anew(model)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers, tied ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _check_fit(
    model: str, slots: Iterable[BaseSlot], loaded: Mapping[str, torch.Tensor], info: Mapping[str, Iterable[Any]]
) -> None:
    trained_as_a_whole = {slot.plain for slot in slots if ".original_module." in f".{slot.name}"}
    misfits = [f"'{name}' is missing" for name in info.get("missing_keys", ()) if name not in trained_as_a_whole]
    misfits += [f"'{name}' is not in the model" for name in info.get("unexpected_keys", ())]
    for slot in slots:
        source = loaded.get(slot.plain)
        if source is None:
            misfits.append(f"'{slot.name}' has no counterpart in a {model} of this config")
        elif source.shape != slot.tensor.shape:
            misfits.append(
                f"'{slot.name}': the model wants shape {list(slot.tensor.shape)}, its config gives {list(source.shape)}"
            )
    if misfits:
        more = f" and {len(misfits) - _LISTED} more" if len(misfits) > _LISTED else ""
        raise CheckpointError(
            f"{len(misfits)} tensors do not fit the wrapped {model}: {'; '.join(sorted(misfits)[:_LISTED])}{more}. "
            "Use a layout that maps them, or strict=False for names that may be left over"
        )


def _fill(
    slots: Iterable[BaseSlot],
    loaded: Mapping[str, torch.Tensor],
    device: torch.device,
    buffer_size: int,
    progress: bool | Progress | None,
) -> None:
    fresh: dict[int, torch.Tensor] = {}
    places: list[tuple[BaseSlot, torch.Tensor]] = []
    jobs: dict[int, tuple[torch.Tensor, Region, str]] = {}
    for slot in slots:
        old, new = slot.tensor, loaded[slot.plain].detach()
        if old.is_meta or isinstance(old, LazyTensor):
            fresh.setdefault(id(old), LazyTensor.from_tensor(new).to(old.dtype))
            places.append((slot, old))
        elif slot.persistent:
            jobs.setdefault(id(old), (new, Region.of(old.detach()), slot.name))
    reals = materialize(
        fresh.values(), device=device, buffer_size=buffer_size, progress=progress, desc="Loading", alias=True
    )
    write_into(jobs.values(), buffer_size=buffer_size, progress=progress, desc="Loading")
    real_of = dict(zip(fresh, reals, strict=True))
    wearing: dict[int, torch.Tensor] = {}
    for slot, old in places:
        new = wearing.setdefault(id(old), dressed(real_of[id(old)], old))
        # Modules may keep further references: recurrent ones have a list of their weights.
        setattr(slot.owner, slot.name.rpartition(".")[2], new)
