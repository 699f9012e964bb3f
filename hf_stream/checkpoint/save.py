"""Save named tensors as a checkpoint, straight from where they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from hf_stream.checkpoint.files import DEFAULT_MAX_SHARD_SIZE, CheckpointFiles
from hf_stream.checkpoint.staging import Staging
from hf_stream.checkpoint.writer import finish, reserve
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.lazy import write_into


def save_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    metadata: Mapping[str, str] | None = None,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> Path:
    """Save tensors, lazy or real, as a safetensors checkpoint, with an index when there are several shards.

    The files are those that `safetensors.torch.save_file` would write, byte for byte, spread over shards as
    `huggingface_hub.split_torch_state_dict_into_shards` does it. Lazy tensors are streamed; they may come from the very
    files that are replaced. A new directory appears complete or not at all; in one that exists, old weights go and no
    mixture of old and new ever loads. Tied tensors are written under each of their names.

    Args:
        tensors: Name -> tensor. Strided and non-contiguous ones are welcome.
        directory: Where to save.
        max_shard_size: Bytes, or a string such as "5GB"; a larger tensor gets a shard of its own.
        metadata: Text entries for each file's header; `format: pt` is added.
        buffer_size: Bytes in flight, at most; the inputs of one deferred operation come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        The directory.

    Raises:
        FormatError: The format cannot hold a name, a type or a shape.
        CheckpointError: No space, the destination is a file, or another process is saving to it.
        CopyError: Reading or writing failed. The destination is as it was.
    """
    files = CheckpointFiles.plan(tensors, max_shard_size=max_shard_size, metadata=metadata)
    staging = Staging(directory)
    write_files(staging, files, tensors, buffer_size=buffer_size, progress=progress)
    return Path(directory)


def write_files(
    staging: Staging,
    files: CheckpointFiles,
    tensors: Mapping[str, torch.Tensor],
    *,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> None:
    """Fill all shards at once, and commit; on an error, leave nothing behind."""
    try:
        regions = reserve(staging, files)
        jobs = [(tensors[name], region, name) for name, region in regions.items()]
        write_into(jobs, buffer_size=buffer_size, progress=progress, desc="Saving")
    except BaseException:
        staging.abandon()
        raise
    finish(staging, files)
