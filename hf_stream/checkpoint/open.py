"""Open a checkpoint on disk as a mapping of names to tensors that are not loaded yet."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hf_stream.errors import CheckpointError
from hf_stream.formats.index import read_index
from hf_stream.formats.safetensors import Header, header_nbytes, parse_header
from hf_stream.lazy import LazyTensor
from hf_stream.storage.file import FileStorage

logger = logging.getLogger(__name__)

_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


class Checkpoint(Mapping[str, LazyTensor]):
    """The tensors of one or more safetensors files, by name, in the order of the files and of their bytes.

    Only headers are read. The files stay open, so replacing or deleting them later does no harm; a tensor read twice
    is the same object twice.

    Attributes:
        path: what was opened.
        metadata: the `__metadata__` of the files (of the first file that has an entry, where they differ).
        headers: each file's header, by file name.
    """

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.headers: dict[str, Header] = {}
        self._storages: dict[str, FileStorage] = {}
        self._file_of: dict[str, str] = {}
        self._lazies: dict[str, LazyTensor] = {}
        for file, location in files.items():
            self._add(file, location)

    def _add(self, file: str, location: Path) -> None:
        storage = FileStorage(location)
        header = _header(storage)
        self._storages[file] = storage
        self.headers[file] = header
        self.metadata = {**header.metadata, **self.metadata}
        for name in header.tensors:
            other = self._file_of.setdefault(name, file)
            if other != file:
                raise CheckpointError(
                    f"'{name}' is in two files of '{self.path}': '{other}' and '{file}'; "
                    "add an index that says which one counts, or remove one"
                )

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._lazies:
            file = self._file_of[name]
            info = self.headers[file].tensors[name]
            self._lazies[name] = LazyTensor.from_storage(
                self._storages[file], info.torch_dtype, info.torch_shape, info.start
            )
        return self._lazies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __repr__(self) -> str:
        return f"Checkpoint('{self.path}', tensors={len(self)}, files={len(self.headers)}, nbytes={self.nbytes})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for header in self.headers.values() for info in header.tensors.values())

    def file_of(self, name: str) -> str:
        """The name of the file that holds the tensor."""
        return self._file_of[name]

    @property
    def storages(self) -> Mapping[str, FileStorage]:
        """The open files, by file name."""
        return self._storages


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint; reads headers and nothing else.

    Args:
        source: A safetensors file, an index file, or a directory: with `model.safetensors`, else with an index, else
            all its safetensors files together.

    Returns:
        A mapping of names to LazyTensors: `checkpoint["lm_head.weight"][:8].materialize()` reads eight rows.

    Raises:
        FormatError: A header or the index is not what its format says.
        CheckpointError: There is nothing to open, a shard is missing, a shard lacks a tensor that the index says it
            has, or two files hold one name.
    """
    path = Path(source)
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise CheckpointError(f"'{path}' does not exist; pass a directory, a .safetensors file or an index file")
    if path.name.endswith(_INDEX_SUFFIX):
        return _open_index(path, path)
    if path.suffix == ".safetensors":
        return Checkpoint(path, {path.name: path})
    raise CheckpointError(f"'{path}' is neither a directory nor a .safetensors file nor a {_INDEX_SUFFIX} file")


def open_files(path: str | os.PathLike[str], files: Iterable[str | os.PathLike[str]]) -> Checkpoint:
    """Open just these safetensors files as one checkpoint, called `path` in errors."""
    return Checkpoint(Path(path), {os.path.basename(file): Path(file) for file in files})


def _open_directory(path: Path) -> Checkpoint:
    single = path / "model.safetensors"
    if single.exists():
        return Checkpoint(path, {single.name: single})
    indices = sorted(path.glob("*" + _INDEX_SUFFIX))
    if len(indices) == 1 or path / ("model" + _INDEX_SUFFIX) in indices:
        standard = path / ("model" + _INDEX_SUFFIX)
        return _open_index(path, standard if standard in indices else indices[0])
    if indices:
        names = ", ".join(f"'{index.name}'" for index in indices)
        raise CheckpointError(f"'{path}' has {len(indices)} index files ({names}); pass the path of one of them")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"'{path}' holds no .safetensors file and no index")
    _check_family(path, files)
    return Checkpoint(path, {file.name: file for file in files})


def _open_index(path: Path, index: Path) -> Checkpoint:
    weight_map = read_index(index).weight_map
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    missing = [file for file in by_file if not (index.parent / file).exists()]
    if missing:
        listed = ", ".join(f"'{file}'" for file in missing[:5])
        raise CheckpointError(
            f"'{index}' names {len(by_file)} files, {len(missing)} of them are missing: {listed}; "
            "download or copy them, the checkpoint is not whole"
        )
    checkpoint = Checkpoint(path, {file: index.parent / file for file in by_file})
    for file, names in by_file.items():
        header = checkpoint.headers[file]
        lacking = [name for name in names if name not in header.tensors]
        if lacking:
            raise CheckpointError(
                f"'{index}' says that '{file}' has '{lacking[0]}' ({len(lacking)} such tensors), but it has not; "
                "index and shards belong to different checkpoints"
            )
    unlisted = [name for name in checkpoint if name not in weight_map]
    if unlisted:
        logger.warning("%s: %d tensors are in no index, '%s' for one; they are kept", index, len(unlisted), unlisted[0])
    return checkpoint


def _check_family(path: Path, files: list[Path]) -> None:
    """Shards say in their names how many they are: a lost one is seen even without an index."""
    found: dict[tuple[str, int], set[int]] = {}
    for file in files:
        shard = _SHARD.fullmatch(file.name)
        if shard:
            found.setdefault((shard["stem"], int(shard["count"])), set()).add(int(shard["number"]))
    for (stem, count), numbers in found.items():
        lost = sorted(set(range(1, count + 1)) - numbers)
        if lost:
            raise CheckpointError(
                f"'{path}' has {len(numbers)} of the {count} shards of '{stem}', number {lost[0]} is missing; "
                "download or copy it, the checkpoint is not whole"
            )


def _header(storage: FileStorage) -> Header:
    prefix = memoryview(bytearray(min(8, storage.nbytes)))
    storage.read_into(prefix, 0)
    whole = memoryview(bytearray(header_nbytes(prefix, storage.nbytes, storage.name)))
    storage.read_into(whole, 0)
    return parse_header(whole, storage.nbytes, storage.name)
