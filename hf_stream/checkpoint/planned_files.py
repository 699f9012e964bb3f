"""The weight files that a conversion writes: what they are called, and what their headers say of their source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from hf_stream.checkpoint.files import DEFAULT_PATTERN, CheckpointFiles, either, family
from hf_stream.checkpoint.mapping import AnyLayout
from hf_stream.checkpoint.nested_conversion import Nesting
from hf_stream.checkpoint.nested_structure import STATE_FILE
from hf_stream.checkpoint.open import Checkpoint
from hf_stream.checkpoint.origin import ORIGIN, origin_metadata
from hf_stream.formats.shards import SAFE_WEIGHTS, shard_pattern
from hf_stream.formats.weight_names import index_name, is_known, kept_name

# Bytes that no file has.
_NO_LIMIT: Final = 1 << 63


def plan_files(
    tensors: Mapping[str, torch.Tensor],
    source: Checkpoint,
    file: str | None,
    max_shard_size: int | str,
    layout: AnyLayout | None,
) -> CheckpointFiles:
    """The files of one checkpoint, called as those of the source are, where that is a name for what a layout makes."""
    any_name = layout is None and source.location.is_dir()
    name = kept_name(source.files, any_name=any_name) if file is None else file
    files = CheckpointFiles.plan(
        tensors,
        max_shard_size=max_shard_size if file is None else _NO_LIMIT,
        metadata=_metadata(source, file, as_it_is=layout is None),
        pattern=shard_pattern(name),
        index=index_name(name),
    )
    if is_known(name):
        return files
    # Opened as a directory, what libraries look for would be found first.
    return replace(files, family=either(files.family, family(DEFAULT_PATTERN, index_name(SAFE_WEIGHTS))))


def plan_nesting_files(nesting: Nesting, file: str | None, max_shard_size: int | str) -> CheckpointFiles:
    """The files of all that a file of torch.save or of OLMo holds."""
    pattern = shard_pattern(STATE_FILE) if nesting.metadata else DEFAULT_PATTERN
    return CheckpointFiles.plan(
        nesting.tensors,
        max_shard_size=max_shard_size if file is None else _NO_LIMIT,
        metadata=nesting.metadata if file is None else {**nesting.metadata, **nesting.origin},
        pattern=pattern if file is None else shard_pattern(file),
    )


def _metadata(checkpoint: Checkpoint, file: str | None, *, as_it_is: bool) -> dict[str, str]:
    """That of the source; what this says of an origin does not hold for the new files."""
    metadata = {key: value for key, value in checkpoint.metadata.items() if key != ORIGIN}
    if file is not None and len(checkpoint.files) == 1:
        metadata.update(origin_metadata(*checkpoint.storages.values(), as_it_is=as_it_is))
    return metadata
