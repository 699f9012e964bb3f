"""The index of a sharded checkpoint: which file holds which tensor."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final

from hf_stream.errors import FormatError, IndexFileError
from hf_stream.formats.foreign import pointer
from hf_stream.formats.regular_files import read_small

_DAMAGED: Final = "The index is damaged: get it again or save the checkpoint anew."


@dataclass(frozen=True)
class WeightIndex:
    """What an index file says.

    Attributes:
        weight_map: File name of each tensor, relative to the directory of the index and inside it.
        metadata: As in the file, usually "total_size" in bytes; empty if there is none.
    """

    weight_map: dict[str, str]
    metadata: dict[str, Any]


def read_index(path: str | os.PathLike[str]) -> WeightIndex:
    """Read and check an index file.

    File names may lie in subfolders, as transformers allows, but not outside the directory of the index.

    Raises:
        FormatError: The file is no index, names a tensor twice, or names a file outside its directory.
        CheckpointError: It has more than 100 MB, or is no regular file.
        OSError: It cannot be read.
    """
    name = os.fspath(path)
    data = read_small(path)
    try:
        index = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        if text := pointer(name, data, len(data)):
            raise IndexFileError(text) from None
        fact = f"'{name}': index is not JSON in UTF-8 with unique names ({error}). {_DAMAGED}"
        raise IndexFileError(fact, getattr(error, "doc", ""), getattr(error, "pos", 0)) from None
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise FormatError(f"'{name}': index has no object 'weight_map'. {_DAMAGED}")
    weight_map: dict[str, Any] = index["weight_map"]
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise FormatError(f"'{name}': 'metadata' of the index is not an object. {_DAMAGED}")
    checked = set()
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise FormatError(f"'{name}': file of tensor '{tensor}' is not a string. {_DAMAGED}")
        if file_name not in checked:
            _check_inside(name, tensor, file_name)
            checked.add(file_name)
    return WeightIndex(weight_map, metadata)


def encode_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any] | None = None) -> bytes:
    """The bytes of an index file as transformers writes them: indented, names sorted, a newline at the end."""
    index = {"metadata": dict(metadata or {}), "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"'{repeated}' is repeated")
    return unique


def _check_inside(name: str, tensor: str, file_name: str) -> None:
    # Whatever the system this runs on: a checkpoint means the same everywhere.
    parts = file_name.split("/")
    outside = PurePosixPath(file_name).is_absolute() or PureWindowsPath(file_name).drive or ".." in parts
    if outside or parts[-1] in ("", ".") or "\\" in file_name or "\0" in file_name:
        raise FormatError(
            f"'{name}': file of tensor '{tensor}' is {file_name!r}, not a file name inside the directory of the index. "
            "Do not load this checkpoint unless you trust it; then correct the name."
        )
