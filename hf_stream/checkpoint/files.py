"""The files that a set of named tensors becomes: shard names, headers and the index, all known before any data."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_stream.errors import CheckpointError
from hf_stream.formats import Header, encode_header, encode_index, shard_pattern, split_into_shards
from hf_stream.formats.torchscript import TensorArchive

DEFAULT_MAX_SHARD_SIZE = "5GB"
DEFAULT_PATTERN = shard_pattern()
_NO_LIMIT = 1 << 63
_NOTHING = re.compile("(?!)")


class TensorLike(Protocol):
    """What has a shape and a dtype: real, lazy and meta tensors, or a spec of one's own."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class ShardFile:
    """One file to be: its name, the bytes of its header, and where its tensors go.

    Attributes:
        archive: None for a safetensors file; for a TorchScript archive, what is to be written after the tensor.
    """

    name: str
    prefix: bytes
    header: Header
    archive: TensorArchive | None = None


@dataclass(frozen=True)
class CheckpointFiles:
    """All weight files of a checkpoint to be.

    Attributes:
        shards: In order.
        small: Other files by name: the index, where there are several shards.
        entry: The file that makes a directory loadable: the index, or the only shard.
        family: Matches every weight file that an earlier save under these names may have left, and that is to go.
    """

    shards: tuple[ShardFile, ...]
    small: Mapping[str, bytes]
    entry: str
    family: re.Pattern[str]

    @classmethod
    def plan(
        cls,
        specs: Mapping[str, TensorLike],
        *,
        max_shard_size: int | str | None = None,
        metadata: Mapping[str, str] | None = None,
        file: str | None = None,
        pattern: str = DEFAULT_PATTERN,
        index: str | None = None,
        index_metadata: Mapping[str, object] | None = None,
        sizes: Mapping[str, int] | None = None,
        groups: Mapping[str, Hashable] | None = None,
    ) -> CheckpointFiles:
        """Spread tensors over shards as `huggingface_hub.split_torch_state_dict_into_shards` does.

        Args:
            specs: Anything with a shape and a dtype, by name.
            max_shard_size: Bytes, or a string such as "5GB", which is the default; a larger tensor gets a shard of its
                own.
            metadata: Text entries for each file's header; `format: pt` is added, as transformers does.
            file: The name of the one file that takes all tensors, and leaves all other files alone.
            pattern: File name with `{suffix}` where the shard number goes.
            index: File name of the index; the single file's name with ".index.json" after it by default.
            index_metadata: More entries for the index's metadata, before `total_size`.
            sizes: Bytes that tensors count with, where they are not their own (those of a larger storage, say).
            groups: Names with equal ids go to one shard.

        Raises:
            FormatError: The format cannot hold a name, a type or a shape.
            CheckpointError: There is one file, and `max_shard_size` as well.
        """
        if file is not None:
            if max_shard_size is not None:
                raise CheckpointError(
                    f"'{file}' is to be one file, whatever its size; pass a directory, or no max_shard_size"
                )
            pattern, max_shard_size = shard_pattern(file), _NO_LIMIT
        elif max_shard_size is None:
            max_shard_size = DEFAULT_MAX_SHARD_SIZE
        own = {name: math.prod(spec.shape) * spec.dtype.itemsize for name, spec in specs.items()}
        split = split_into_shards({**own, **(sizes or {})}, max_shard_size, pattern, groups)
        metadata = {"format": "pt", **(metadata or {})}
        single = pattern.format(suffix="")
        index = index or single + ".index.json"
        shards = []
        # No tensors make no shard, but a file without tensors is a checkpoint as well.
        for shard, names in (split.filename_to_tensors or {single: []}).items():
            prefix, header = encode_header({name: (specs[name].dtype, specs[name].shape) for name in names}, metadata)
            shards.append(ShardFile(shard, prefix, header))
        stale = family(pattern, index) if file is None else _NOTHING
        if not split.is_sharded:
            return cls(tuple(shards), {}, single, stale)
        content = encode_index(split.tensor_to_filename, {**(index_metadata or {}), **split.metadata})
        return cls(tuple(shards), {index: content}, index, stale)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.header.nbytes for shard in self.shards) + sum(map(len, self.small.values()))


def check_has_data(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has a shape but no bytes in a row, before anything is written.

    Raises:
        CheckpointError: The tensor is on the meta device, sparse, or a subclass that wraps other tensors.
    """
    if tensor.is_meta:
        raise CheckpointError(f"'{name}' is on the meta device and has no data; load it first, or leave it out")
    wraps: bool = is_traceable_wrapper_subclass(tensor)  # as a type guard mypy finds it impossible
    if wraps:
        raise CheckpointError(
            f"'{name}' is a {type(tensor).__name__}, whose data is in other tensors; save the plain tensor"
        )
    if tensor.layout != torch.strided:
        raise CheckpointError(f"'{name}' has the layout {tensor.layout}; make it dense first, with .to_dense()")


def either(*families: re.Pattern[str]) -> re.Pattern[str]:
    """Matches what one of several matches."""
    return re.compile("|".join(f"(?:{family.pattern})" for family in families))


def family(pattern: str, index: str | None = None) -> re.Pattern[str]:
    """Matches every weight file of a pattern with `{suffix}`, sharded or not, and their index."""
    before, after = (re.escape(part) for part in pattern.format(suffix="\0").split("\0"))
    weights = rf"{before}(-\d{{5}}-of-\d{{5}})?{after}"
    return re.compile(weights if index is None else rf"{weights}|{re.escape(index)}")
