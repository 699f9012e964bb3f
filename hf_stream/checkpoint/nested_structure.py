"""Where the structure of a nested state is in its files: in the headers' metadata, or in a tensor of bytes."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import torch

from hf_stream.checkpoint.nested_leaves import TENSOR
from hf_stream.errors import FormatError
from hf_stream.formats.nested import dump_structure, parse_json
from hf_stream.formats.strict_json import Pairs
from hf_stream.lazy import LazyTensor

STATE_FILE: Final = "state.safetensors"
STRUCTURE: Final = "hf_stream.structure"
# No path in a nesting is called so.
STRUCTURE_TENSOR: Final = "__structure__"

_VERSION: Final = 1
# A tenth of what a header may have: the rest is for the names of the tensors.
_MAX_METADATA: Final = 10_000_000


def structure_metadata(tree: Any, tensors: MutableMapping[str, torch.Tensor]) -> dict[str, str]:
    """The metadata that holds the structure, or says which tensor does; that one is added."""
    text = dump_structure({"version": _VERSION, "state": tree})
    content = text.encode()
    if len(content) > _MAX_METADATA:
        tensors[STRUCTURE_TENSOR] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        text = dump_structure({"version": _VERSION, TENSOR: STRUCTURE_TENSOR})
    return {STRUCTURE: text}


def read_structure(text: str, tensors: Mapping[str, LazyTensor]) -> Any:
    """The structure's tree, from what the metadata says.

    Raises:
        FormatError: It is none.
    """
    fields = _fields(text)
    if fields.get(TENSOR) == STRUCTURE_TENSOR:
        lazy = tensors.get(STRUCTURE_TENSOR)
        if lazy is None or lazy.dtype != torch.uint8 or lazy.dim() != 1:
            raise FormatError(f"'{STRUCTURE_TENSOR}' is not the text of the structure. Get the file again.")
        try:
            fields = _fields(str(lazy.materialize().numpy().data, "utf-8"))
        except UnicodeDecodeError as error:
            raise FormatError(f"'{STRUCTURE_TENSOR}' is not text ({error}). Get the file again.") from None
    if "state" not in fields:
        raise FormatError("the structure has no 'state'. Get the file again.")
    return fields["state"]


def _fields(text: str) -> dict[str, Any]:
    tree = parse_json(text)
    fields = dict(tree) if isinstance(tree, Pairs) else {}
    version = fields.get("version")
    if type(version) is not int or len(fields) != 2 or len(tree) != 2:
        raise FormatError("the structure is no object of 'version' and one more. Get the file again.")
    if version != _VERSION:
        raise FormatError(f"the structure has version {version}, known is {_VERSION}. Use a newer hf_stream.")
    return fields
