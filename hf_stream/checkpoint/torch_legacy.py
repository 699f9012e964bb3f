"""Files that torch.save wrote before 1.6, which are no zip archives: read through torch, into memory."""

from __future__ import annotations

import logging
import mmap
import os
import struct
from typing import Any, Final

import torch

from hf_stream.errors import ArchiveError, FormatError, PickleError
from hf_stream.formats.budget import Budget
from hf_stream.formats.foreign import pointer
from hf_stream.formats.torch_pickle import StorageRecord, TensorRecord, TorchPickle
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage
from hf_stream.storage.memory import MemoryStorage

logger = logging.getLogger(__name__)

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_NUMEL: Final = struct.Struct("<q")

_FOLLOWED: Final = (dict, list, tuple, TensorRecord)

Places = dict[str, tuple[Storage, int]]


def read_legacy(storage: FileStorage) -> tuple[Any, Places]:
    """What was saved, with a `TensorRecord` for each tensor, and where the storages are in memory.

    The file is read once as data first, and checked: so what torch then loads has no names but those that are allowed.

    Raises:
        FormatError: It is no such file, is damaged, or holds more than tensors, containers and plain values.
    """
    name = storage.name
    if storage.nbytes == 0:
        raise PickleError(f"'{name}' is empty")
    with storage.descriptor() as fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        state, used = _check(data, name)
    logger.warning(
        "'%s' is of the format that torch.save had before 1.6, which is loaded as a whole: it takes %d bytes of "
        "memory; save it again with a newer torch",
        name,
        storage.nbytes,
    )
    with storage.descriptor() as fd, open(os.dup(fd), "rb") as file:
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    places: Places = {record.key: (MemoryStorage(torch.empty(0)), 0) for record in used.values() if not record.nbytes}
    _find_storages(state, loaded, places, set())
    return state, places


def _check(data: mmap.mmap, name: str) -> tuple[Any, dict[str, StorageRecord]]:
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
    for key in keys:
        record = used[key]
        if record.dtype is None:
            raise ArchiveError(f"'{name}': storage '{key}' has no type, and torch cannot read it")
        numel = _NUMEL.unpack_from(data, at)[0] if at + _NUMEL.size <= len(data) else -1
        at += _NUMEL.size + record.nbytes
        if numel * record.dtype.itemsize != record.nbytes or at > len(data):
            raise ArchiveError(f"'{name}': storage '{key}' of {record.nbytes} bytes is not whole. Get the file again.")
    if at != len(data):
        raise ArchiveError(f"'{name}' has {len(data) - at} bytes after its end. Get the file again.")
    return state, used


def _find_storages(record: Any, loaded: Any, places: Places, seen: set[int]) -> None:
    """Where torch has put the storages: the same place in both nestings holds the same tensor."""
    todo = [(record, loaded)]
    while todo:
        record, loaded = todo.pop()
        if id(record) in seen:
            continue
        if isinstance(record, TensorRecord):
            if record.storage.nbytes:
                places.setdefault(record.storage.key, (MemoryStorage(loaded), 0))
            if record.attributes:
                todo.append((record.attributes, loaded.__dict__))
        elif isinstance(record, dict):
            todo.extend((value, loaded[key]) for key, value in record.items() if isinstance(value, _FOLLOWED))
        elif isinstance(record, list | tuple):
            todo.extend(pair for pair in zip(record, loaded, strict=True) if isinstance(pair[0], _FOLLOWED))
        seen.add(id(record))
        if attributes := getattr(record, "__dict__", None):
            todo.append((attributes, loaded.__dict__))
