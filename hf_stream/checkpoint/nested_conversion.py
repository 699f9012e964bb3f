"""What a file of torch.save or of OLMo becomes as a whole: an ordinary checkpoint if it is flat, or a nested state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_stream.checkpoint.nested_leaves import LeafWriter
from hf_stream.checkpoint.nested_structure import STRUCTURE_TENSOR, structure_metadata
from hf_stream.checkpoint.open import Checkpoint
from hf_stream.checkpoint.origin import origin_metadata
from hf_stream.checkpoint.state_files import StateFile, open_state
from hf_stream.errors import FormatError
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.nested import encode_structure
from hf_stream.lazy import LazyTensor


@dataclass(frozen=True)
class Nesting:
    """All that a file holds, to be written.

    Attributes:
        source: Its tensors, named as they will be.
        tensors: The same and, where it is large, the structure.
        metadata: What tells the structure; empty for a flat one.
        origin: What one file of it says of the source.
    """

    source: Checkpoint
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    origin: Mapping[str, str]


def open_nesting(path: Path, *, skip_unreadable: bool = False) -> Nesting | None:
    """Open a file of torch.save or of OLMo to be converted as a whole; None for all other files, and for directories.

    Raises:
        FormatError: The file is damaged, or holds what no nested state can hold.
    """
    opened = open_state(path, skip_unreadable=skip_unreadable) if path.is_file() else None
    if opened is None:
        return None
    origin = origin_metadata(opened.storage)
    with collector_paused():
        if _is_flat(opened.state):
            source = _source(path, StateFile(opened.storage, opened.state))
            return Nesting(source, dict(source), {}, origin)
        writer = LeafWriter()
        try:
            tree = encode_structure(opened.state, writer)
        except FormatError as error:
            raise FormatError(f"'{path}': {error} Or convert one dict of its tensors, with key= (--key).") from None
        tensors = writer.place()
        metadata = structure_metadata(tree, tensors)
    lazies: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name != STRUCTURE_TENSOR}
    return Nesting(_source(path, StateFile(opened.storage, lazies)), tensors, metadata, origin)


def _is_flat(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and bool(state)
        and all(type(key) is str and isinstance(value, LazyTensor) for key, value in state.items())
        and all(map(_is_unicode, state))
    )


def _is_unicode(name: str) -> bool:
    """Whether a file can have a tensor of this name; Python's text may hold halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _source(path: Path, file: StateFile) -> Checkpoint:
    return Checkpoint(path, {path.name: path}, opened={path.name: file})
