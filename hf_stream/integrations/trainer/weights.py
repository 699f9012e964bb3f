"""The weights of a checkpoint: through the layout into files, and back into a model that is there already."""

from __future__ import annotations

import json
import logging
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import _is_peft_model

from hf_stream.checkpoint import apply_layout, load_into, open_checkpoint
from hf_stream.checkpoint.carried import LAYOUT_RECORD
from hf_stream.checkpoint.files import CheckpointFiles
from hf_stream.checkpoint.save import write_files
from hf_stream.checkpoint.staging import Staging
from hf_stream.errors import CheckpointError, LayoutError
from hf_stream.formats.regular_files import read_json_object
from hf_stream.integrations.trainer.settings import Settings
from hf_stream.integrations.transformers.mixin import layout_of
from hf_stream.integrations.transformers.save import save_pretrained
from hf_stream.layouts.composable import Chain, TwoWay, is_two_way
from hf_stream.layouts.from_transformers import from_transformers

logger = logging.getLogger(__name__)

_WRAPPERS = re.compile(r"((module|_orig_mod)\.)+")


def who_saves(model: Any) -> str | None:
    """What makes a model one whose weights its own libraries save and load, in words; None if nothing does."""
    if _is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False):  # type: ignore[no-untyped-call]
        return "adapters"
    if getattr(model, "hf_quantizer", None) is not None:
        return "a quantized model"
    return None


@contextmanager
def streaming(model: PreTrainedModel, settings: Settings) -> Iterator[None]:
    """Run a block in which `model.save_pretrained` streams, through the layout."""

    def save(*args: Any, **kwargs: Any) -> None:
        # For the length of the call the model has its own method again.
        hidden = vars(model).pop("save_pretrained")
        try:
            save_pretrained(
                model,
                *args,
                layout=layout_to_file(model, settings),
                max_shard_size=settings.max_shard_size,
                durable=settings.durable,
                buffer_size=settings.buffer_size,
                progress=settings.progress,
                **kwargs,
            )
        finally:
            vars(model)["save_pretrained"] = hidden

    before = vars(model).get("save_pretrained")
    vars(model)["save_pretrained"] = save
    try:
        yield
    finally:
        del vars(model)["save_pretrained"]
        if before is not None:
            vars(model)["save_pretrained"] = before


def save_module(module: nn.Module, directory: Path, settings: Settings, save_others: Callable[[Path], object]) -> None:
    """Save a module that transformers knows nothing about, and with it what `save_others` puts into a directory."""
    tensors = apply_layout(settings.layout, module.state_dict(), config=_config_of(module))
    files = CheckpointFiles.plan(tensors, max_shard_size=settings.max_shard_size)
    staging = Staging(directory, durable=settings.durable)
    try:
        save_others(staging.path)
        write_files(staging, files, tensors, buffer_size=settings.buffer_size, progress=settings.progress)
    finally:
        staging.abandon()


def load_weights(model: nn.Module, directory: Path, settings: Settings) -> None:
    """Fill a model with a checkpoint's weights, in place.

    Raises:
        CheckpointError: A weight is missing or left over, or the checkpoint is in another layout than the callback's.
            Nothing has been changed then.
    """
    tensors = _unwrapped(open_checkpoint(directory), model)
    if _is_in_layout(directory, settings):
        assert settings.layout is not None
        tensors = apply_layout(settings.layout.inverse, tensors, config=_config_of(model))
    tensors = apply_layout(layout_of(model), tensors, config=_config_of(model))
    if isinstance(model, PreTrainedModel):
        tensors = from_transformers(model)({**_never_saved(model), **tensors})
    load_into(model, tensors, buffer_size=settings.buffer_size, progress=settings.progress)


def write_record(directory: Path, settings: Settings) -> None:
    """Note beside the weights which layout they are in; nothing if they are as `save_pretrained` writes them."""
    if settings.layout is None:
        (directory / LAYOUT_RECORD).unlink(missing_ok=True)
        return
    content = json.dumps({"layout": _name_of(settings.layout)}, indent=2) + "\n"
    staging = Staging(directory, file=LAYOUT_RECORD, durable=settings.durable)
    try:
        staging.write(LAYOUT_RECORD, content.encode())
        staging.commit(entry=LAYOUT_RECORD)
    finally:
        staging.abandon()


def layout_to_file(model: Any, settings: Settings) -> TwoWay | None:
    """From what transformers would save to what is saved.

    Raises:
        LayoutError: The model's class has a layout without an inverse.
    """
    own = layout_of(model)
    if own is None:
        return settings.layout
    if not is_two_way(own):
        raise LayoutError(f"the layout of {type(model).__name__} has no inverse, which saving needs; make it a Layout")
    return Chain.of([own.inverse, settings.layout] if settings.layout is not None else [own.inverse])


def _unwrapped(tensors: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Weights under the model's own names, where Trainer has saved a wrapper's: `torch.compile`'s, `DataParallel`'s."""
    found = {name: _WRAPPERS.match(name) for name in tensors}
    if all(found.values()) and found.keys().isdisjoint(model.state_dict()):
        return {name[match.end() :]: tensors[name] for name, match in found.items() if match}
    return tensors


def _config_of(model: nn.Module) -> object:
    return getattr(model, "config", None)


def _never_saved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What the model keeps out of its checkpoints, which it has always as it is."""
    names = set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def _is_in_layout(directory: Path, settings: Settings) -> bool:
    """Whether the weights are in the callback's layout; if not, they are as `save_pretrained` writes them."""
    record = directory / LAYOUT_RECORD
    if not record.exists():
        if settings.layout is not None:
            logger.info("'%s' was saved without a layout, and is loaded without", directory)
        return False
    recorded = read_json_object(record).get("layout", False)
    if recorded is not None and not isinstance(recorded, str):
        raise CheckpointError(f"'{record}' does not say which layout the weights are in; get the checkpoint again")
    if settings.layout is None:
        raise CheckpointError(f"'{directory}' was saved in another layout, {_short(recorded)}; pass it to the callback")
    name = _name_of(settings.layout)
    if name is not None and recorded is not None and name != recorded:
        raise CheckpointError(
            f"'{directory}' was saved in another layout, {_short(recorded)}, than the callback's, {_short(name)}; "
            "resume with that one"
        )
    return True


def _name_of(layout: TwoWay) -> str | None:
    """A layout as it is written; None if that is not the same in every process."""
    name = repr(layout)
    return None if " at 0x" in name else name


def _short(name: str | None) -> str:
    return textwrap.shorten(name, 200) if name is not None else "one without a name"
