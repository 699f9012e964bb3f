"""Files that torch.save wrote before 1.6, which are no zip archives: pickles, and after them the storages in a row."""

from __future__ import annotations

import mmap
import struct
from typing import Any, Final

from hf_stream.errors import ArchiveError, FormatError, PickleError
from hf_stream.formats.budget import Budget
from hf_stream.formats.foreign import pointer
from hf_stream.formats.torch_pickle import TorchPickle
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_NUMEL: Final = struct.Struct("<q")

Places = dict[str, tuple[Storage, int]]


def read_legacy(storage: FileStorage) -> tuple[Any, Places]:
    """What was saved, with a `TensorRecord` for each tensor, and where in the file the storages are.

    Raises:
        FormatError: It is no such file, or is damaged.
    """
    if storage.nbytes == 0:
        raise PickleError(f"'{storage.name}' is empty")
    with storage.descriptor() as fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        state, starts = _parse(data, storage.name)
    return state, {key: (storage, start) for key, start in starts.items()}


def _parse(data: mmap.mmap, name: str) -> tuple[Any, dict[str, int]]:
    reader = TorchPickle(Budget(len(data)), legacy=True)
    try:
        magic, at = reader.read(data, name)
    except FormatError:
        magic, at = None, 0
    if magic != _MAGIC or type(magic) is not int:
        if fact := pointer(name, data[:100], len(data)):
            raise PickleError(fact)
        raise PickleError(f"'{name}' is no file of torch.save: it is neither a zip archive nor of the format before it")
    protocol, at = reader.read(data, name, at)
    system, at = reader.read(data, name, at)
    if protocol != _PROTOCOL or type(system) is not dict or system.get("little_endian") is not True:
        raise ArchiveError(f"'{name}' is not of the version that is known, or was written by a big-endian machine")
    state, at = reader.read(data, name, at)
    used = dict(reader.storages)
    keys, at = reader.read(data, name, at)
    if type(keys) is not list or any(type(key) is not str for key in keys) or sorted(keys) != sorted(used):
        raise ArchiveError(
            f"'{name}': the storages that follow are not those that the tensors need. Get the file again."
        )
    starts = {}
    for key in keys:
        record = used[key]
        if record.dtype is None:
            raise ArchiveError(f"'{name}': storage '{key}' has no type, and torch cannot read it")
        numel = _NUMEL.unpack_from(data, at)[0] if at + _NUMEL.size <= len(data) else -1
        starts[key] = at + _NUMEL.size
        at = starts[key] + record.nbytes
        if numel * record.dtype.itemsize != record.nbytes or at > len(data):
            raise ArchiveError(f"'{name}': storage '{key}' of {record.nbytes} bytes is not whole. Get the file again.")
    if at != len(data):
        raise ArchiveError(f"'{name}' has {len(data) - at} bytes after its end. Get the file again.")
    return state, starts
