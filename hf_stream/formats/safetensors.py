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

from hf_stream.errors import FormatError
from hf_stream.formats import strict_json
from hf_stream.formats.dtypes import BITS, NAMES, RANK, TORCH_DTYPES
from hf_stream.formats.strict_json import Pairs, nesting

MAX_HEADER_NBYTES: Final = 100_000_000

_METADATA: Final = "__metadata__"
_FIELDS: Final = ("dtype", "shape", "data_offsets")
_LENGTH: Final = struct.Struct("<Q")
_USIZE_MAX: Final = 2**64 - 1
_MAX_NESTING: Final = 127
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
                f"F4 of shape {list(self.shape)}: torch packs two elements into a byte, so that the last dimension must "
                "be even to load it. Copy the file without loading this tensor."
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
        OSError: It cannot be read.
    """
    name = os.fspath(path)
    with open(path, "rb", buffering=0) as file:
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
        raise FormatError(
            f"'{name}': {len(prefix)} bytes are too few for the header's length, which takes 8. {_DAMAGED}"
        )
    (length,) = _LENGTH.unpack_from(prefix)
    if length > MAX_HEADER_NBYTES:
        raise FormatError(f"'{name}': header of {length} bytes, the limit is {MAX_HEADER_NBYTES}. {_DAMAGED}")
    stop: int = _LENGTH.size + length
    if stop > file_size:
        raise FormatError(f"'{name}': header of {length} bytes in a file of {file_size} bytes. {_DAMAGED}")
    return stop


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
        raise FormatError(f"'{name}': got {len(prefix)} bytes of a header of {data} bytes. Read the whole header.")
    try:
        header = strict_json.decode(str(prefix[_LENGTH.size : data], "utf-8"))
    except RecursionError:
        raise FormatError(f"'{name}': header nests deeper than {_MAX_NESTING} levels. {_DAMAGED}") from None
    except ValueError as error:
        raise FormatError(f"'{name}': header is not JSON in UTF-8 ({error}). {_DAMAGED}") from None
    if not isinstance(header, Pairs):
        raise FormatError(f"'{name}': header is not a JSON object. {_DAMAGED}")
    try:
        metadata, tensors = _entries(header, data)
        end = _check_gapless(tensors, data)
    except ValueError as error:
        raise FormatError(f"'{name}': {error}. {_DAMAGED}") from None
    if end != file_size:
        raise FormatError(
            f"'{name}': header and tensors take {end} bytes, the file has {file_size}. "
            "It is cut off or was appended to: get it again."
        )
    return Header(tensors, metadata, file_size)


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
    """
    unplaced = sorted(
        ((key, *_encoded(key, dtype, shape)) for key, (dtype, shape) in specs.items()),
        key=lambda item: (-RANK[item[1]], item[0]),
    )
    entries: dict[str, object] = {} if metadata is None else {_METADATA: dict(sorted(metadata.items()))}
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


def _entries(header: Pairs, data: int) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Metadata and tensors in the order of their bytes, which are counted from `data`.

    Of a repeated tensor name the last entry counts, but each must be well formed; `__metadata__` may stand only once.
    """
    metadata: dict[str, str] | None = None
    tensors: dict[str, TensorInfo] = {}
    for key, value in header:
        if key != _METADATA:
            tensors[key] = _tensor(key, value, data)
        elif metadata is None:
            metadata = _metadata(value)
        else:
            raise ValueError(f"'{_METADATA}' stands there twice")
    return metadata or {}, dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Pairs):
        raise ValueError(f"'{_METADATA}' is not an object of strings")
    metadata = {}
    for key, text in value:
        if not isinstance(text, str):
            raise ValueError(f"'{_METADATA}' entry '{key}' is not a string")
        metadata[key] = text
    return metadata


def _tensor(key: str, value: object, data: int) -> TensorInfo:
    dtype, shape, offsets = _fields(key, value)
    if isinstance(dtype, Pairs) and len(dtype) == 1 and dtype[0][1] is None:
        dtype = dtype[0][0]  # {"F32": null}: the library's other spelling of "F32"
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor '{key}': unknown dtype {dtype!r:.40}, known are {', '.join(BITS)}")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError(f"tensor '{key}': shape is not a list of sizes (whole numbers below 2**64)")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"tensor '{key}': data_offsets are not two offsets (whole numbers below 2**64)")
    return TensorInfo(dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _fields(key: str, value: object) -> tuple[object, object, object]:
    """dtype, shape and data_offsets of a tensor's entry, which is an object or a list of the three."""
    if isinstance(value, list) and len(value) == len(_FIELDS):
        dtype, shape, offsets = value
        return dtype, shape, offsets
    if not isinstance(value, Pairs):
        raise ValueError(f"tensor '{key}': entry is not an object with {', '.join(_FIELDS)}")
    fields: dict[str, object] = {}
    for field, content in value:
        if field not in _FIELDS:
            if nesting(content) + 2 > _MAX_NESTING:
                raise ValueError(f"tensor '{key}': '{field}' nests deeper than {_MAX_NESTING} levels")
        elif field in fields:
            raise ValueError(f"tensor '{key}': '{field}' stands there twice")
        else:
            fields[field] = content
    if len(fields) < len(_FIELDS):
        raise ValueError(f"tensor '{key}': no {', '.join(field for field in _FIELDS if field not in fields)}")
    return fields["dtype"], fields["shape"], fields["data_offsets"]


def _check_gapless(tensors: Mapping[str, TensorInfo], data: int) -> int:
    """Check that tensors follow each other from `data` on and are as large as they say; returns the end of the last."""
    end = data
    for key, info in tensors.items():
        if info.start != end or info.stop < info.start:
            raise ValueError(
                f"tensor '{key}': data_offsets [{info.start - data}, {info.stop - data}], "
                f"but the tensor before it ends at {end - data}"
            )
        end = info.stop
        nbytes = _nbytes(key, info.dtype, info.shape)
        if info.nbytes != nbytes:
            raise ValueError(
                f"tensor '{key}': {info.nbytes} bytes, but {info.dtype} of shape {list(info.shape)} takes {nbytes}"
            )
    return end


def _nbytes(key: str, dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; multiplied in the library's order, which refuses [2**63, 2, 0] but not [0, 2**63, 2]."""
    bits = 1
    for factor in (*shape, BITS[dtype]):
        bits *= factor
        if bits > _USIZE_MAX:
            raise ValueError(f"tensor '{key}': {dtype} of shape {list(shape)} has more than 2**64 bits")
    if bits % 8:
        raise ValueError(f"tensor '{key}': {dtype} of shape {list(shape)} takes {bits} bits, which fill no whole bytes")
    return bits // 8


def _encoded(key: str, dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int], int]:
    """The format's dtype, shape and bytes for a torch tensor."""
    if key == _METADATA:
        raise FormatError(f"no tensor can be called '{_METADATA}': the format keeps that name for itself. Rename it.")
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
        return name, sizes, _nbytes(key, name, sizes)
    except ValueError as error:
        raise FormatError(f"{error}. Save it in another shape or dtype.") from None
