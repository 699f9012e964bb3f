"""Save named tensors as a checkpoint, straight from where they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from hf_stream.checkpoint.files import CheckpointFiles, check_has_data
from hf_stream.checkpoint.paths import place_of
from hf_stream.checkpoint.staging import Staging
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.copying.region import Region
from hf_stream.errors import CheckpointError
from hf_stream.formats.foreign import unwritten
from hf_stream.lazy import named_tensors, write_into
from hf_stream.storage.file import FileStorage
from hf_stream.utils.sizes import nbytes_of


def save_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    durable: bool | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> Path:
    """Save tensors, lazy or real, as a safetensors checkpoint, with an index when there are several shards.

    The files are those that `safetensors.torch.save_file` would write, byte for byte, spread over shards as
    `huggingface_hub.split_torch_state_dict_into_shards` does it. Lazy tensors are streamed; they may come from the very
    files that are replaced. A new directory appears complete or not at all; in one that exists, old weights go and no
    mixture of old and new ever loads. Tied tensors are written under each of their names. A path that ends in
    .safetensors is one file, beside which everything stays as it is.

    This holds for processes that are killed, and for a loss of power.

    Args:
        tensors: Name -> tensor. Strided and non-contiguous ones are welcome.
        directory: Where to save, or the one file to write.
        max_shard_size: For directories: bytes, or a string such as "2GB"; 5 GB by default. A larger tensor gets a shard
            of its own.
        metadata: Text entries for each file's header; `format: pt` is added.
        durable: Whether to wait until everything is on the disk, so that it outlives a loss of power. None: yes, unless
            the environment has HF_STREAM_DURABLE=0.
        buffer_size: Bytes in flight, at most, also as "64MB"; the inputs of one deferred operation come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        The directory, or the file.

    Raises:
        FormatError: The format cannot hold a name, a type or a shape.
        CheckpointError: No space, the destination cannot be used, another process is saving to it, or a tensor has no
            data (meta).
        CopyError: Reading or writing failed. The destination is as it was.
    """
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    tensors = named_tensors(tensors, "save_checkpoint")
    place, file = place_of(directory)
    if fact := unwritten(directory):
        raise CheckpointError(fact)
    files = CheckpointFiles.plan(tensors, max_shard_size=max_shard_size, metadata=metadata, file=file)
    staging = Staging(place, file=file, durable=durable)
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
        for name, tensor in tensors.items():
            check_has_data(name, tensor)
        regions = reserve(staging, files)
        jobs = [(tensors[name], region, name) for name, region in regions.items()]
        write_into(jobs, buffer_size=buffer_size, progress=progress, desc="Saving")
        finish(staging, files)
    except BaseException:
        staging.abandon()
        raise


def reserve(staging: Staging, files: CheckpointFiles) -> dict[str, Region]:
    """Create every shard that is not finished, with its header, and say where each of its tensors goes.

    After this only finished shards and what belongs to this checkpoint are staged, and its space is reserved.
    """
    staging.keep([shard.name for shard in files.shards])
    storages: dict[str, FileStorage] = {}
    for shard in files.shards:
        if shard.name not in staging.finished:
            storages[shard.name] = staging.create(shard.name, shard.header.nbytes)
    for name, content in files.small.items():
        staging.write(name, content)
    regions = {}
    for shard in files.shards:
        if (reserved := storages.get(shard.name)) is not None:
            reserved.write_from(memoryview(shard.prefix), 0)
            for name, info in shard.header.tensors.items():
                regions[name] = Region.contiguous(reserved, info.torch_dtype, info.torch_shape, info.start)
    return regions


def finish(staging: Staging, files: CheckpointFiles) -> None:
    """Declare every shard whole, and commit."""
    for shard in files.shards:
        if shard.name not in staging.finished:
            staging.finish(shard.name)
    staging.commit(entry=files.entry, stale=files.family)
