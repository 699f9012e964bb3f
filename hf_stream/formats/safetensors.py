"""The header of a safetensors file: read it, check it, and build the one that the library would write.

A file is the header's length N (8 bytes, little-endian), N bytes of JSON, and the tensors' bytes without gaps:

    {"__metadata__": {"format": "pt"}, "wte.weight": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}, ...}

`parse_header` accepts exactly the headers that the safetensors library accepts.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hf_stream.errors import ArgumentTypeError, FormatError, SafetensorsError
from hf_stream.formats import strict_json
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.dtypes import NAMES, RANK, TORCH_DTYPES
from hf_stream.formats.entries import MAX_NESTING, METADATA, parse_entries, tensor_nbytes
from hf_stream.formats.foreign import pointer
from hf_stream.formats.regular_files import open_regular
from hf_stream.formats.strict_json import Pairs

MAX_HEADER_NBYTES: Final = 100_000_000

_LENGTH: Final = struct.Struct("<Q")
_DAMAGED: Final = "The file is damaged or not a safetensors file: get it again."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        dtype: The format's name of the element type, such as "BF16".
        shape: As in the header, in elements (for "F4": two of torch's last dimension for each byte).
        start: First byte of the tensor, counted from the start of the file.
        stop: The byte after its last one.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.stop - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type of the elements; six-bit floats have none and raise `FormatError`."""
        try:
            return TORCH_DTYPES[self.dtype]
        except KeyError:
            raise FormatError(
                f"dtype {self.dtype} has no torch type, so that such a tensor can be copied but not loaded. "
                "Leave it out, or convert it with the tool that wrote it."
            ) from None

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape as a torch tensor: [..., n] -> [..., n / 2] for "F4", of which torch packs two into an element."""
        if self.dtype != "F4":
            return self.shape
        *outer, last = self.shape
        if last % 2:
            raise FormatError(
                f"F4 of shape {list(self.shape)} has no torch shape: torch packs two elements of the last dimension "
                "into a byte. Such a tensor can be copied but not loaded."
            )
        return (*outer, last // 2)


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself.

    Attributes:
        tensors: In the order of their bytes, which they cover without gap or overlap.
        metadata: The free text entries, empty if there are none.
        nbytes: Size of the whole file.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    nbytes: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a file; reads these bytes and no others.

    Raises:
        FormatError: The safetensors library would refuse the file.
        CheckpointError: It is no regular file.
        OSError: It cannot be read.
    """
    name = os.fspath(path)
    with open(open_regular(path), "rb", buffering=0) as file:
        file_size = os.fstat(file.fileno()).st_size
        prefix = _read(file, _LENGTH.size)
        prefix += _read(file, header_nbytes(prefix, file_size, name) - _LENGTH.size)
    return parse_header(prefix, file_size, name)


def header_nbytes(prefix: bytes | bytearray | memoryview, file_size: int, name: str = "header") -> int:
    """Size of the header with its length field, from the first 8 bytes of the file: what `parse_header` needs.

    Args:
        prefix: At least the first 8 bytes, if the file has them.
        file_size: Size of the whole file in bytes.
        name: What errors call the file.
    """
    if len(prefix) < _LENGTH.size:
        raise SafetensorsError(
            f"'{name}': {len(prefix)} bytes are too few for the header's length, which takes 8. {_DAMAGED}"
        )
    (length,) = _LENGTH.unpack_from(prefix)
    if length > MAX_HEADER_NBYTES:
        if fact := pointer(name, prefix, file_size):
            raise SafetensorsError(fact)
        raise SafetensorsError(f"'{name}': header of {length} bytes, the limit is {MAX_HEADER_NBYTES}. {_DAMAGED}")
    stop: int = _LENGTH.size + length
    if stop > file_size:
        raise SafetensorsError(f"'{name}': header of {length} bytes in a file of {file_size} bytes. {_DAMAGED}")
    return stop


@collector_paused()
def parse_header(prefix: bytes | bytearray | memoryview, file_size: int, name: str = "header") -> Header:
    """Check the first bytes of a file and say where its tensors are.

    Args:
        prefix: The file from its first byte to the end of the header or beyond (`header_nbytes` says how many).
        file_size: Size of the whole file in bytes.
        name: What errors call the file.

    Raises:
        FormatError: The safetensors library would refuse the file.
    """
    data = header_nbytes(prefix, file_size, name)
    if len(prefix) < data:
        raise SafetensorsError(f"'{name}': got {len(prefix)} bytes of a header of {data} bytes. Read the whole header.")
    try:
        header = strict_json.decode(str(prefix[_LENGTH.size : data], "utf-8"))
    except RecursionError:
        raise SafetensorsError(f"'{name}': header nests deeper than {MAX_NESTING} levels. {_DAMAGED}") from None
    except ValueError as error:
        raise SafetensorsError(f"'{name}': header is not JSON in UTF-8 ({error}). {_DAMAGED}") from None
    if not isinstance(header, Pairs):
        raise SafetensorsError(f"'{name}': header is not a JSON object. {_DAMAGED}")
    try:
        metadata, entries = parse_entries(header)
    except ValueError as error:
        raise SafetensorsError(f"'{name}': {error}. {_DAMAGED}") from None
    tensors = {key: TensorInfo(dtype, shape, data + start, data + stop) for key, (dtype, shape, start, stop) in entries}
    end = data + (entries[-1][1].stop if entries else 0)
    if end != file_size:
        raise SafetensorsError(
            f"'{name}': header and tensors take {end} bytes, the file has {file_size}. "
            "It is cut off or was appended to: get it again."
        )
    return Header(tensors, metadata, file_size)


@collector_paused()
def encode_header(
    specs: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """Build the header that `safetensors.torch.save_file` writes for tensors of these types and shapes.

    The bytes are the library's own. It writes several metadata entries in random order; here they are sorted.

    Args:
        specs: Torch type and torch shape of each tensor. Their order does not matter.
        metadata: Text entries. None writes none, an empty mapping an empty object, as the library does.

    Returns:
        The first bytes of the file, and the header that `parse_header` makes of them. Tensors lie in the order of
        `Header.tensors`: by falling alignment of their type, then by name.

    Raises:
        FormatError: The format cannot hold a name, a type or a shape.
        ArgumentTypeError: An entry is not text.
    """
    for key, entry in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(entry, str):
            raise ArgumentTypeError(f"metadata entry {key!r}: {entry!r:.40} is not text. Pass strings only.")
    unplaced = sorted(
        ((key, *_encoded(key, dtype, shape)) for key, (dtype, shape) in specs.items()),
        key=lambda item: (-RANK[item[1]], item[0]),
    )
    entries: dict[str, object] = {} if metadata is None else {METADATA: dict(sorted(metadata.items()))}
    offset = 0
    for key, dtype, shape, nbytes in unplaced:
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"a name or metadata entry is not Unicode text ({error}). Rename it.") from None
    text += b" " * (-len(text) % _LENGTH.size)
    if len(text) > MAX_HEADER_NBYTES:
        raise FormatError(
            f"header of {len(text)} bytes for {len(unplaced)} tensors, the limit is {MAX_HEADER_NBYTES}. "
            "Spread them over several files."
        )
    header = _LENGTH.pack(len(text)) + text
    tensors = {}
    start = len(header)
    for key, dtype, shape, nbytes in unplaced:
        tensors[key] = TensorInfo(dtype, tuple(shape), start, start + nbytes)
        start += nbytes
    return header, Header(tensors, dict(sorted((metadata or {}).items())), start)


def _read(file: io.FileIO, nbytes: int) -> bytes:
    """Exactly `nbytes` from where the file stands, fewer only at its end: one system call may return less."""
    parts = []
    while nbytes and (part := file.read(nbytes)):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _encoded(key: str, dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int], int]:
    """The format's dtype, shape and bytes for a torch tensor."""
    if key == METADATA:
        raise FormatError(f"no tensor can be called '{METADATA}': the format keeps that name for itself. Rename it.")
    if dtype not in NAMES:
        raise FormatError(
            f"tensor '{key}': safetensors cannot hold {dtype}. Cast it to one of {', '.join(map(str, NAMES))}."
        )
    name = NAMES[dtype]
    sizes = [int(size) for size in shape]
    if any(size < 0 for size in sizes):
        raise FormatError(f"tensor '{key}': shape {sizes} has a negative size. Pass the shape of a tensor.")
    if name == "F4" and sizes:
        sizes[-1] *= 2
    try:
        return name, sizes, tensor_nbytes(key, name, sizes)
    except ValueError as error:
        raise FormatError(f"{error}. Save it in another shape or dtype.") from None
