"""Offloading to disk: what transformers writes to its offload folder goes there without being loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from transformers.integrations import accelerate

from hf_stream.checkpoint.files import CheckpointFiles, ShardFile
from hf_stream.checkpoint.save import write_files
from hf_stream.checkpoint.staging import Staging
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.formats import encode_header
from hf_stream.formats.shared import Shared
from hf_stream.lazy import LazyTensor

_buffer_size: ContextVar[int] = ContextVar("hf_stream_offload_buffer_size", default=DEFAULT_BUFFER_SIZE)


@contextmanager
def streamed_offload(buffer_size: int) -> Iterator[None]:
    """Run a block in which lazies that transformers offloads stream to their files, one after the other.

    Args:
        buffer_size: Bytes in flight, at most.
    """
    token = _buffer_size.set(buffer_size)
    try:
        with _hooked():
            yield
    finally:
        _buffer_size.reset(token)


@Shared
@contextmanager
def _hooked() -> Iterator[None]:
    """Transformers keeps the index of what it has offloaded; only the writing of a file is replaced."""
    # By name, as it is imported there from elsewhere.
    plain = vars(accelerate)["save_file"]

    def save_file(tensors: Mapping[str, torch.Tensor], filename: str | os.PathLike[str], *args: Any) -> None:
        if any(isinstance(tensor, LazyTensor) for tensor in tensors.values()):
            _stream_file(tensors, Path(filename))
        else:
            plain(tensors, filename, *args)

    vars(accelerate)["save_file"] = save_file
    try:
        yield
    finally:
        vars(accelerate)["save_file"] = plain


def _stream_file(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the file that `safetensors.torch.save_file` would; it appears whole or not at all."""
    prefix, header = encode_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    shard = ShardFile(path.name, prefix, header)
    files = CheckpointFiles((shard,), {}, entry=path.name, family=re.compile(re.escape(path.name)))
    # The folder is scratch space: nobody looks for it after a loss of power.
    staging = Staging(path.parent, file=path.name, durable=False)
    write_files(staging, files, tensors, buffer_size=_buffer_size.get(), progress=False)
