"""`PeftModel.save_pretrained`, streaming: peft says what goes into which file, and we write the weights."""

from __future__ import annotations

import inspect
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, peft_model

from hf_stream.checkpoint.files import CheckpointFiles, ShardFile, check_has_data
from hf_stream.checkpoint.save import reserve
from hf_stream.checkpoint.staging import Staging
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.formats import encode_header
from hf_stream.formats.shared import Shared
from hf_stream.integrations.transformers.log_names import logged_as
from hf_stream.layouts.lora_adapter import WEIGHTS_FILE
from hf_stream.lazy import write_into
from hf_stream.utils.sizes import nbytes_of

_CARD = "README.md"
_WEIGHTS = re.compile(rf"(.*/)?{re.escape(WEIGHTS_FILE)}", re.DOTALL)

Tensors = Mapping[str, torch.Tensor]


def save_adapters(
    model: PeftModel,
    save_directory: str | os.PathLike[str],
    *args: Any,
    durable: bool | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
    **kwargs: Any,
) -> None:
    """`model.save_pretrained(...)` of PEFT: adapters, their configs and the model card, without the base model.

    The files are those of plain peft, byte for byte. A new directory appears complete or not at all; in one that
    exists, no mixture of an old and a new adapter ever loads. `hf_stream.save_pretrained` comes here for a `PeftModel`.

    Args:
        model: The wrapped model.
        save_directory: Where to save; adapters that are not called "default" go into folders of their own. Like all
            arguments not named here (`selected_adapters`, `save_embedding_layers`, ...), as in peft.
        durable: Whether to wait until everything is on the disk, so that it outlives a loss of power. None: yes, unless
            the environment has HF_STREAM_DURABLE=0.
        buffer_size: Bytes in flight, at most, also as text such as "64MB".
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Raises:
        CheckpointError: No space, or the destination cannot be used.
        CopyError: Writing failed. The destination is as it was.
    """
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    asked = inspect.signature(PeftModel.save_pretrained).bind(model, save_directory, *args, **kwargs).arguments
    if not asked.get("is_main_process", True):
        model.save_pretrained(os.fspath(save_directory), *args, **kwargs)
        return
    staging = Staging(save_directory, durable=durable)
    try:
        card = staging.directory / _CARD
        if card.is_file():
            # Peft adds to the card that is there.
            shutil.copyfile(card, staging.path / _CARD)
        with _recording() as files, logged_as(staging.path, save_directory):
            model.save_pretrained(os.fspath(staging.path), *args, **kwargs)
        jobs = []
        for name, (tensors, metadata) in files.items():
            for key, tensor in tensors.items():
                check_has_data(key, tensor)
            specs = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
            shard = ShardFile(os.path.relpath(name, staging.path), *encode_header(specs, metadata))
            regions = reserve(staging, CheckpointFiles((shard,), {}, shard.name, _WEIGHTS))
            jobs += [(tensors[key], region, key) for key, region in regions.items()]
        write_into(jobs, buffer_size=buffer_size, progress=progress, desc="Saving")
        names = [os.path.relpath(name, staging.path) for name in files]
        for name in names:
            staging.finish(name)
        # A config that is put in place before its weights never meets others.
        staging.commit(entry=names[0] if names else _CARD, stale=_WEIGHTS)
    finally:
        staging.abandon()


Files = dict[str, tuple[Tensors, Mapping[str, str] | None]]
"""What is to be in each safetensors file."""

_files: ContextVar[Files | None] = ContextVar("hf_stream_adapter_files", default=None)


@contextmanager
def _recording() -> Iterator[Files]:
    """Run a block in which peft, in this context, names safetensors files and does not write them."""
    files: Files = {}
    with _hooked():
        token = _files.set(files)
        try:
            yield files
        finally:
            _files.reset(token)


@Shared
@contextmanager
def _hooked() -> Iterator[None]:
    """Other threads see the hook and pass through it untouched."""
    name = "safe_save_file"
    plain = getattr(peft_model, name)

    def save_file(tensors: Tensors, filename: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        files = _files.get()
        if files is None:
            plain(tensors, filename, metadata)
        else:
            files[os.fspath(filename)] = tensors, metadata

    setattr(peft_model, name, save_file)
    try:
        yield
    finally:
        setattr(peft_model, name, plain)
