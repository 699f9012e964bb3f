"""TorchScript archives of one tensor each, which LibTorch loads without Python: their bytes but for the tensor's.

An archive is a zip of a module without code whose one attribute is the tensor. All its bytes are known before the
tensor's, except for the CRC-32 of these, which stands before them and once more at the end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final

import torch

from hf_stream.errors import FormatError
from hf_stream.formats.dtypes import NAMES
from hf_stream.formats.safetensors import TensorInfo
from hf_stream.formats.zip_writer import CRC_AT, NewRecord, directory_of, header_of

_STORAGES: Final[Mapping[torch.dtype, str]] = {
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.bool: "BoolStorage",
    torch.uint8: "ByteStorage",
    torch.int8: "CharStorage",
    torch.int16: "ShortStorage",
    torch.int32: "IntStorage",
    torch.int64: "LongStorage",
    torch.complex64: "ComplexFloatStorage",
}

_MODULE: Final = "hf_stream"
_CLASS: Final = "TensorContainer"
# What every module has.
_TAKEN: Final = frozenset({"training", "_is_full_backward_hook"})


@dataclass(frozen=True)
class TensorArchive:
    """A file that is to hold one tensor.

    Attributes:
        prefix: Its bytes before the tensor's, with 0 where their CRC-32 will be.
        tensor: Where the tensor's bytes go.
        nbytes: Size of the whole file.
    """

    prefix: bytes
    tensor: TensorInfo
    nbytes: int
    record: NewRecord
    rest: Sequence[tuple[NewRecord, bytes]]

    def closing(self, crc32: int) -> list[tuple[int, bytes]]:
        """What is left to write when the CRC-32 of the tensor's bytes is known: offsets, and the bytes for each."""
        after = b"".join(header_of(record) + content for record, content in self.rest)
        records = [self.record._replace(crc32=crc32), *(record for record, _ in self.rest)]
        stop = self.tensor.stop
        return [(CRC_AT, struct.pack("<I", crc32)), (stop, after + directory_of(records, stop + len(after)))]


def tensor_archive(stem: str, attribute: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorArchive:
    """Lay out the archive that `torch.jit.load` gives back as a module with one tensor.

    Args:
        stem: The file's name without its extension: the folder of the zip's records.
        attribute: What the module calls the tensor; dots are welcome.
        dtype: Of the tensor.
        shape: Of the tensor, which is contiguous.

    Raises:
        FormatError: TorchScript has no such type, or the attribute cannot be called that.
    """
    if dtype not in _STORAGES:
        raise FormatError(
            f"tensor '{attribute}': TorchScript files cannot hold {dtype}. Cast it, to torch.float16 for one."
        )
    if not attribute.isascii() or not attribute.isprintable() or set(attribute) & set("\"\\'") or attribute in _TAKEN:
        raise FormatError(f"{attribute!r:.200} cannot be an attribute of a TorchScript module. Rename the tensor.")
    sizes = tuple(map(int, shape))
    numel = torch.Size(sizes).numel()
    record = NewRecord(f"{stem}/data/0".encode(), 0, numel * dtype.itemsize, 0)
    prefix = header_of(record)
    tensor = TensorInfo(NAMES[dtype], sizes, len(prefix), len(prefix) + record.nbytes)
    rest, at = [], tensor.stop
    for name, content in (
        ("data.pkl", _pickle(attribute, dtype, sizes, numel)),
        (f"code/__torch__/{_MODULE}.py", _code(attribute)),
        ("constants.pkl", b"\x80\x02)."),
        ("version", b"3\n"),
        ("byteorder", b"little"),
    ):
        small = NewRecord(f"{stem}/{name}".encode(), at, len(content), zlib.crc32(content))
        rest.append((small, content))
        at += len(header_of(small)) + len(content)
    nbytes = at + len(directory_of([record, *(small for small, _ in rest)], at))
    return TensorArchive(prefix, tensor, nbytes, record, rest)


def _code(attribute: str) -> bytes:
    return (
        f"class {_CLASS}(Module):\n"
        "  __parameters__ = []\n"
        "  __buffers__ = []\n"
        "  training : bool\n"
        "  _is_full_backward_hook : Optional[bool]\n"
        f'  __annotations__["{attribute}"] = Tensor\n'
    ).encode()


def _pickle(attribute: str, dtype: torch.dtype, shape: tuple[int, ...], numel: int) -> bytes:
    """The module's state, of which the tensor is a view of storage 0."""
    strides = tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()
    storage = [_text("storage"), _name("torch", _STORAGES[dtype]), _text("0"), _text("cpu"), _int(numel)]
    view = [_tuple(*storage) + b"Q", _int(0), _tuple(*map(_int, shape)), _tuple(*map(_int, strides)), b"\x89"]
    hooks = _name("collections", "OrderedDict") + b")R"
    tensor = _name("torch._utils", "_rebuild_tensor_v2") + _tuple(*view, hooks) + b"R"
    state = [_text("training") + b"\x88", _text("_is_full_backward_hook") + b"N", _text(attribute) + tensor]
    return b"\x80\x02" + _name(f"__torch__.{_MODULE}", _CLASS) + b")\x81}(" + b"".join(state) + b"ub."


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _int(number: int) -> bytes:
    # LibTorch reads numbers beyond 32 bits only if they take eight bytes.
    return b"J" + struct.pack("<i", number) if number < 1 << 31 else b"\x8a\x08" + struct.pack("<q", number)
