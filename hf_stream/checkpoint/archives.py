"""Checkpoints of one TorchScript archive for each tensor: opening such a file, planning them, and closing them."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from hf_stream.checkpoint.files import DEFAULT_PATTERN, CheckpointFiles, ShardFile, TensorLike, family
from hf_stream.checkpoint.torch_file import TorchFile
from hf_stream.checkpoint.weight_files import TensorFacts, facts_of
from hf_stream.errors import FormatError, MissingError
from hf_stream.formats import SAFE_WEIGHTS_INDEX, Header
from hf_stream.formats.archive_names import FAMILY, archive_attribute, archive_name, missing_partition
from hf_stream.formats.torch_pickle import TensorRecord
from hf_stream.formats.torchscript import TensorArchive, tensor_archive
from hf_stream.lazy import LazyTensor
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage

_CHUNK: Final = 1 << 18  # stays in the processor's cache


class ArchiveFile:
    """A TorchScript archive with one tensor, which is called as the file is; not held open."""

    def __init__(self, path: Path, *, verify: bool = False) -> None:
        self._file = TorchFile(path, verify=verify, storage=FileStorage(path, hold=False))
        self.storage = self._file.storage
        self.metadata: Mapping[str, str] = {}
        self.names: Collection[str] = (path.name.removesuffix(".pt"),)
        attribute = archive_attribute(path.name)
        found = self._file.state if type(self._file.state) is dict else {}
        if found.keys() != {attribute} or not isinstance(found[attribute], TensorRecord):
            listed = ", ".join(f"'{name}'" for name in list(found)[:3])
            raise FormatError(
                f"'{path}' holds {listed or 'no tensors'}; a TorchScript archive with the plain tensor '{attribute}' "
                "alone was wanted beside the other partitions. Move it away, or pass the paths of files."
            )
        self._record = found[attribute]

    def facts(self, name: str) -> TensorFacts:
        del name  # there is only one
        return facts_of(self._record)

    def lazy(self, name: str) -> LazyTensor:
        del name
        return self._file.plain(self._record)

    def close(self) -> None:
        self._file.close()


def find_archives(directory: Path, names: Iterable[str]) -> dict[str, Path]:
    """Those of a directory's files that hold one tensor each, to judge by their names.

    Raises:
        MissingError: A partition is missing.
    """
    files = [name for name in names if archive_attribute(name) is not None]
    if lost := missing_partition(files):
        name, number, count = lost
        raise MissingError(
            f"'{directory}' has {count} partitions of each tensor, but of '{name}' number {number} is missing; "
            "get all files again, the checkpoint is not whole"
        )
    return {file: directory / file for file in files}


def plan_archives(specs: Mapping[str, TensorLike]) -> CheckpointFiles:
    """The files for tensors of these types and shapes: one for each, named after it.

    Raises:
        FormatError: A name or a type cannot be in such a file.
    """
    shards = []
    for name, spec in specs.items():
        file, attribute = archive_name(name)
        archive = tensor_archive(file.removesuffix(".pt"), attribute, spec.dtype, spec.shape)
        header = Header({name: archive.tensor}, {}, archive.nbytes)
        shards.append(ShardFile(file, archive.prefix, header, archive))
    if len({shard.name.lower() for shard in shards}) < len(shards):
        raise FormatError("two tensors have names that differ in case alone, as files of some systems must not")
    entry = shards[0].name if shards else ""
    # Safetensors files count first when a directory is opened: old ones must go as well.
    stale = re.compile(f"{FAMILY}|{family(DEFAULT_PATTERN, SAFE_WEIGHTS_INDEX).pattern}", re.DOTALL)
    return CheckpointFiles(tuple(shards), {}, entry, stale)


def close_archives(archives: Iterable[tuple[Storage, TensorArchive]]) -> None:
    """Write the checksums and the ends of files whose tensors are there."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(_close, archives):
            pass


def _close(item: tuple[Storage, TensorArchive]) -> None:
    storage, archive = item
    buffer = memoryview(bytearray(min(_CHUNK, archive.tensor.nbytes)))
    crc32 = 0
    for start in range(archive.tensor.start, archive.tensor.stop, _CHUNK):
        piece = buffer[: archive.tensor.stop - start]
        storage.read_into(piece, start)
        crc32 = zlib.crc32(piece, crc32)
    for offset, content in archive.closing(crc32):
        storage.write_from(memoryview(content), offset)
