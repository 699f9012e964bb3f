"""Shards: how large they may be, what they are called, and which tensors go into which."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Final

from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory

from hf_stream.errors import FormatError
from hf_stream.utils.sizes import nbytes_of

SAFE_WEIGHTS: Final = "model.safetensors"
SAFE_WEIGHTS_INDEX: Final = "model.safetensors.index.json"

_WEIGHTS: Final = re.compile(
    r".*(\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|onnx_data|npz)|\.index(\.[^.]+)?\.json)", re.DOTALL
)


def is_weight_file(file_name: str) -> bool:
    """Whether a file holds weights, in any format, or is the index of such files, to judge by its name."""
    return _WEIGHTS.fullmatch(file_name) is not None


def add_variant(file_name: str, variant: str | None) -> str:
    """Put a variant before the extension: ("model.safetensors", "fp16") -> "model.fp16.safetensors"."""
    if variant is None:
        return file_name
    stem, extension = file_name.rsplit(".", 1)
    return f"{stem}.{variant}.{extension}"


def shard_pattern(file_name: str = SAFE_WEIGHTS) -> str:
    """The pattern for `split_into_shards` of an unsharded name: "model.safetensors" -> "model{suffix}.safetensors"."""
    stem = file_name.removesuffix(".safetensors").replace("{", "{{").replace("}", "}}")
    return stem + "{suffix}.safetensors"


def split_into_shards(
    sizes: Mapping[str, int],
    max_shard_size: int | str,
    pattern: str = "model{suffix}.safetensors",
    groups: Mapping[str, Hashable] | None = None,
) -> StateDictSplit:
    """Fill shards with tensors in the order given, as huggingface_hub does it.

    A shard is closed when the next tensor would make it larger than `max_shard_size`; none is reopened. A tensor larger
    than that gets a shard of its own. A single shard has no number in its name, and no tensors make no shard.

    Args:
        sizes: Bytes of each tensor.
        max_shard_size: Bytes, or a size such as "5GB".
        pattern: File name with "{suffix}" where "-00001-of-00002" goes.
        groups: Tensors with one id share a storage and go into one shard: that of the first, whose size alone counts.
            Tensors without an id, or with None, stand alone.

    Raises:
        ArgumentError, ArgumentTypeError: The size is none.
        FormatError: The pattern has no "{suffix}".
    """
    if "{suffix}" not in pattern:
        raise FormatError(f"pattern '{pattern}' gives all shards one name. Put '{{suffix}}' where their number goes.")
    limit = nbytes_of(max_shard_size, "max_shard_size")
    # The library looks for each group in each shard: the time for that would grow with their product.
    leaders, followers = _leaders(sizes, groups or {})
    split = split_state_dict_into_shards_factory(
        {name: sizes[name] for name in leaders},
        get_storage_size=lambda size: size,
        filename_pattern=pattern,
        max_shard_size=limit,
    )
    for leader, names in followers.items():
        split.filename_to_tensors[split.tensor_to_filename[leader]].extend(names)
    if followers:
        split.tensor_to_filename = {name: file for file, names in split.filename_to_tensors.items() for name in names}
    return split


def _leaders(sizes: Mapping[str, int], groups: Mapping[str, Hashable]) -> tuple[list[str], dict[str, list[str]]]:
    """The first tensor of each storage, and for each of these the others."""
    leaders: list[str] = []
    leader_of: dict[Hashable, str] = {}
    followers: dict[str, list[str]] = {}
    for name in sizes:
        group = groups.get(name)
        if group is not None and group in leader_of:
            followers[leader_of[group]].append(name)
            continue
        leaders.append(name)
        if group is not None:
            leader_of[group] = name
            followers[name] = []
    return leaders, followers
