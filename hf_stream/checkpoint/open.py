"""Open a checkpoint on disk as a mapping of names to tensors that are not loaded yet."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hf_stream.checkpoint.staging import check_settled
from hf_stream.errors import CheckpointError, FormatError
from hf_stream.formats import SAFE_WEIGHTS, SAFE_WEIGHTS_INDEX, Header, header_nbytes, parse_header, read_index
from hf_stream.lazy import LazyTensor
from hf_stream.storage.file import FileStorage

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
# With or without a variant: model.safetensors.index.json, model.safetensors.index.fp16.json
_INDEX = re.compile(r"[^.].*\.safetensors\.index(\..+)?\.json")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


class Checkpoint(Mapping[str, LazyTensor]):
    """The tensors of one or more safetensors files, by name, in the order of the files and of their bytes.

    Only headers are read. The files stay open, so replacing or deleting them later does no harm; a tensor read twice
    is the same object twice.

    Attributes:
        path: What was opened.
        metadata: The `__metadata__` of the files (of the first file that has an entry, where they differ).
        headers: Each file's header, by file name.
    """

    def __init__(self, path: Path, files: Mapping[str, Path], weight_map: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.headers: dict[str, Header] = {}
        self._storages: dict[str, FileStorage] = {}
        self._file_of: dict[str, str] = {}
        self._lazies: dict[str, LazyTensor] = {}
        for file, location in files.items():
            self._add(file, location, weight_map or {})
        for file, location in files.items():
            self._check_in_place(file, location)

    def _add(self, file: str, location: Path, weight_map: Mapping[str, str]) -> None:
        if not location.is_file():
            fact = "is not a regular file" if location.exists() else "does not exist"
            raise CheckpointError(f"'{location}' {fact}; pass safetensors files, or a directory that holds them")
        storage = FileStorage(location)
        header = _header(storage)
        self._storages[file] = storage
        self.headers[file] = header
        self.metadata = {**header.metadata, **self.metadata}
        for name in header.tensors:
            if weight_map.get(name, file) != file:
                continue
            other = self._file_of.setdefault(name, file)
            if other != file:
                raise CheckpointError(
                    f"'{name}' is in two files of '{self.path}': '{other}' and '{file}'; "
                    "pass the path of one of them, or add an index that says which one counts"
                )

    def _check_in_place(self, file: str, location: Path) -> None:
        """Refuse old files beside new ones: some were opened before somebody replaced the checkpoint, some after."""
        try:
            there = os.path.samestat(os.stat(location), os.fstat(self._storages[file].fileno()))
        except FileNotFoundError:
            there = False
        if not there:
            raise CheckpointError(f"'{self.path}': '{file}' was replaced while it was being opened; open it again")

    def __getitem__(self, name: str) -> LazyTensor:
        lazy = self._lazies.get(name)
        if lazy is None:
            file = self._file_of[name]
            info = self.headers[file].tensors[name]
            try:
                dtype, shape = info.torch_dtype, info.torch_shape
            except FormatError as error:
                raise FormatError(f"'{name}' in '{self._storages[file].name}': {error}") from None
            lazy = LazyTensor.from_storage(self._storages[file], dtype, shape, info.start)
            lazy = self._lazies.setdefault(name, lazy)
        return lazy

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
        return sum(self.headers[file].tensors[name].nbytes for name, file in self._file_of.items())

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
            has, two files hold one name, or the files are being replaced.
    """
    try:
        return _open(Path(source))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"'{os.fspath(source)}': '{error.filename}' went away while it was being opened; open it again"
        ) from error


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        check_settled(path)
        return _open_directory(path)
    if not path.exists():
        raise CheckpointError(f"'{path}' does not exist; pass a directory, a {_SUFFIX} file or an index file")
    if _INDEX.fullmatch(path.name):
        check_settled(path.parent)
        return _open_index(path, path)
    if path.suffix == _SUFFIX:
        return Checkpoint(path, {path.name: path})
    raise CheckpointError(
        f"'{path}' is neither a directory nor a {_SUFFIX} file nor an index; pass one of these, or convert it first"
    )


def open_files(path: str | os.PathLike[str], files: Iterable[str | os.PathLike[str]]) -> Checkpoint:
    """Open just these safetensors files as one checkpoint, called `path` in errors."""
    places = [Path(os.path.abspath(file)) for file in files]
    top = os.path.commonpath([place.parent for place in places]) if places else ""
    return Checkpoint(Path(path), {os.path.relpath(place, top): place for place in places})


def _open_directory(path: Path) -> Checkpoint:
    single = path / SAFE_WEIGHTS
    if single.exists():
        return Checkpoint(path, {single.name: single})
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    indices = [name for name in names if _INDEX.fullmatch(name)]
    if SAFE_WEIGHTS_INDEX in indices:
        indices = [SAFE_WEIGHTS_INDEX]
    if len(indices) == 1:
        return _open_index(path, path / indices[0])
    if indices:
        listed = ", ".join(f"'{name}'" for name in indices)
        raise CheckpointError(f"'{path}' has {len(indices)} index files ({listed}); pass the path of one of them")
    files = [name for name in names if name.endswith(_SUFFIX)]
    if not files:
        raise CheckpointError(f"'{path}' holds no {_SUFFIX} file and no index; pass the directory of a checkpoint")
    _check_family(path, files)
    return Checkpoint(path, {name: path / name for name in files})


def _open_index(path: Path, index: Path) -> Checkpoint:
    before = os.stat(index)
    weight_map = read_index(index).weight_map
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (index.parent / file).exists()]
    if missing:
        listed = ", ".join(f"'{file}'" for file in missing[:5])
        raise CheckpointError(
            f"'{index}' names {len(files)} files, {len(missing)} of them are missing: {listed}; "
            "download or copy them, the checkpoint is not whole"
        )
    checkpoint = Checkpoint(path, {file: index.parent / file for file in files}, weight_map)
    lacking = [name for name in weight_map if name not in checkpoint]
    if lacking:
        raise CheckpointError(
            f"'{index}' says that '{weight_map[lacking[0]]}' has '{lacking[0]}' ({len(lacking)} such tensors), "
            "but it has not; index and shards belong to different checkpoints: get both again"
        )
    _check_same(index, before)
    unlisted = [name for name in checkpoint if name not in weight_map]
    if unlisted:
        logger.warning(
            "'%s' does not list %d tensors of its files, '%s' for one; they are kept", index, len(unlisted), unlisted[0]
        )
    return checkpoint


def _check_same(index: Path, before: os.stat_result) -> None:
    """An old index with new shards must not pass for a checkpoint."""
    try:
        after = os.stat(index)
    except FileNotFoundError:
        after = None
    if after is None or not os.path.samestat(before, after) or before.st_mtime_ns != after.st_mtime_ns:
        raise CheckpointError(f"'{index}' was replaced while it was being opened; open it again")


def _check_family(path: Path, files: list[str]) -> None:
    """Shards say in their names how many they are: a lost one is seen even without an index."""
    found: dict[tuple[str, int], set[int]] = {}
    for file in files:
        shard = _SHARD.fullmatch(file)
        if shard:
            found.setdefault((shard["stem"], int(shard["count"])), set()).add(int(shard["number"]))
    for (stem, count), numbers in found.items():
        if len(numbers) < count:
            lost = next(number for number in range(1, count + 1) if number not in numbers)
            raise CheckpointError(
                f"'{path}' has {len(numbers)} of the {count} shards of '{stem}', number {lost} is missing; "
                "download or copy it, the checkpoint is not whole"
            )


def _header(storage: FileStorage) -> Header:
    prefix = memoryview(bytearray(min(8, storage.nbytes)))
    storage.read_into(prefix, 0)
    whole = memoryview(bytearray(header_nbytes(prefix, storage.nbytes, storage.name)))
    storage.read_into(whole, 0)
    return parse_header(whole, storage.nbytes, storage.name)
