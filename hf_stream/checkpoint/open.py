"""Open a checkpoint on disk as a mapping of names to tensors that are not loaded yet."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, TypeVar, overload

from hf_stream.checkpoint.again import State, state_of, state_of_directory, until_unchanged
from hf_stream.checkpoint.archives import ArchiveFile, find_archives
from hf_stream.checkpoint.beside import first_change, open_beside
from hf_stream.checkpoint.config import config_beside
from hf_stream.checkpoint.manifests import checkpoint_folders, in_words
from hf_stream.checkpoint.nearest import no_such_name, no_such_path
from hf_stream.checkpoint.overview import overview
from hf_stream.checkpoint.parts import find_parts, is_pattern, part_names
from hf_stream.checkpoint.paths import given_path
from hf_stream.checkpoint.recovery import check_settled
from hf_stream.checkpoint.state_files import open_file, open_file_as_state
from hf_stream.checkpoint.torch_state import Key
from hf_stream.checkpoint.weight_files import SAFETENSORS_SUFFIX as _SUFFIX
from hf_stream.checkpoint.weight_files import TORCH_SUFFIXES, SafetensorsFile, TensorFacts, TorchStateFile, WeightFile
from hf_stream.errors import CheckpointError, FileKindError, MissingError, TensorNameError
from hf_stream.formats import Header, read_index
from hf_stream.formats.foreign import unread
from hf_stream.formats.regular_files import opening
from hf_stream.formats.weight_names import KINDS, bin_stem, kind_of
from hf_stream.lazy import LazyTensor
from hf_stream.storage.file import FileStorage

logger = logging.getLogger(__name__)

Default = TypeVar("Default")

# With or without a variant: model.safetensors.index.json, model.safetensors.index.fp16.json
_INDEX = re.compile(r"[^.].*\.safetensors\.index(\..+)?\.json")
_BIN_WEIGHTS = "pytorch_model.bin"
_OLMO_WEIGHTS = "model.pt"
_BIN_INDEX = re.compile(r"[^.].*\.bin\.index(\..+)?\.json")
# The kind of weights, the file that has all of them, and what indices are called, in the order in which they are tried.
_SINGLES = [
    (kind, f"{name}{ending}", index)
    for kind in KINDS
    for name, ending, index in ((kind, _SUFFIX, _INDEX), (bin_stem(kind), ".bin", _BIN_INDEX))
]
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


class Checkpoint(Mapping[str, LazyTensor]):
    """The tensors of one or more files, by name, in the order of the files and of the tensors in them.

    Only headers are read. The files stay open while the process has few open (half of what `ulimit -n` allows):
    replacing or deleting them later does no harm. Of more files, reading one that was replaced is an error, and never
    gives other values. A tensor read twice is the same object twice. A `with` block closes the files at its end.

    Args:
        path: What errors call the checkpoint.
        files: Places by file name.
        weight_map: Which file counts for a name that several have.
        key: Of the tensors in files of torch.save.
        verify: Whether to compare files of torch.save with their checksums.
        skip_unreadable: Whether to leave out what stands among the tensors in files of torch.save and cannot be read.
        in_parts: Whether tensors of one name in several files are parts of one.
        in_folders: Whether tensors are named after the folder of their file as well.
        archives: Whether the files are TorchScript archives of one tensor each, named after it.
        opened: Those of the files that are open already.

    Attributes:
        path: What was opened.
        location: The same as an absolute path, wherever the process has gone since.
        metadata: The `__metadata__` of the files (of the first file that has an entry, where they differ).
        files: The open files, by name.
    """

    def __init__(
        self,
        path: Path,
        files: Mapping[str, Path],
        weight_map: Mapping[str, str] | None = None,
        *,
        key: Key | None = None,
        verify: bool = False,
        skip_unreadable: bool = False,
        in_parts: bool = False,
        in_folders: bool = False,
        archives: bool = False,
        opened: Mapping[str, WeightFile] | None = None,
    ) -> None:
        self.path = path
        self.location = path.absolute()
        self.metadata: dict[str, str] = {}
        self.files: dict[str, WeightFile] = {}
        self._in_folders = in_folders
        # The file of each tensor, and its name there.
        self._places: dict[str, tuple[str, str]] = {}
        self._lazies: dict[str, LazyTensor] = {}
        for file, location in files.items():
            if not location.is_file():
                there = location.exists()
                kind, fact = (FileKindError, "is not a regular file") if there else (MissingError, "does not exist")
                raise kind(f"'{location}' {fact}; pass weight files, or a directory that holds them")
            if opened and file in opened:
                self.files[file] = opened[file]
            elif archives:
                self.files[file] = ArchiveFile(location, verify=verify)
            else:
                self.files[file] = open_file(location, key=key, verify=verify, skip_unreadable=skip_unreadable)
            self.metadata = {**self.files[file].metadata, **self.metadata}
        if in_parts:
            for file, names in zip(files, part_names([file.names for file in self.files.values()]), strict=True):
                self._places |= {name: (file, inner) for name, inner in names.items()}
        else:
            for file in files:
                self._add(file, weight_map or {})
        # Old files beside new ones: some were opened before somebody replaced the checkpoint, some after.
        self.check_in_place()

    def check_in_place(self) -> None:
        """Refuse files that are no longer where they were opened: what lies beside them may belong to others.

        Raises:
            CheckpointError: One was replaced, moved or deleted; names it.
        """
        for file, storage in self.storages.items():
            try:
                status = os.stat(storage.path)
                there = storage.place == ("file", status.st_dev, status.st_ino)
            except FileNotFoundError:
                there = False
            if not there:
                raise CheckpointError(f"'{self.path}': '{file}' was replaced while it was in use; open it again")

    @property
    def directory(self) -> Path:
        """Where the files are, and what lies beside them."""
        return self.location if self.location.is_dir() else self.location.parent

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files: from then on, reading a tensor that is still lazy is a `CopyError`.

        Names and shapes stay known, and tensors that are materialized, or mapped into memory, stay as they are.
        """
        for file in self.files.values():
            file.close()

    def check_unchanged(self) -> None:
        """Refuse files that are not as they were when they were opened.

        Raises:
            CopyError: One was changed; names it.
        """
        for storage in self.storages.values():
            storage.check_unchanged()

    def _add(self, file: str, weight_map: Mapping[str, str]) -> None:
        folder = os.path.dirname(file) if self._in_folders else ""
        for inner in self.files[file].names:
            name = f"{folder}/{inner}" if folder else inner
            if weight_map.get(name, file) != file:
                continue
            other, _ = self._places.setdefault(name, (file, inner))
            if other != file:
                raise CheckpointError(
                    f"'{name}' is in two files of '{self.path}': '{other}' and '{file}'; "
                    "pass the path of one of them, or add an index that says which one counts"
                )

    def __getitem__(self, name: str) -> LazyTensor:
        """The tensor, not loaded.

        Raises:
            TensorNameError: There is none of that name (a `KeyError`); says which are like it.
        """
        file, inner = self._place(name)
        lazy = self._lazies.get(name)
        if lazy is None:
            lazy = self._lazies.setdefault(name, self.files[file].lazy(inner))
        return lazy

    def _place(self, name: str) -> tuple[str, str]:
        """The file of a tensor, and its name there."""
        place = self._places.get(name) if isinstance(name, str) else None
        if place is None:
            raise TensorNameError(no_such_name(name, self._places, f"'{self.path}'"))
        return place

    @overload
    def get(self, name: str, default: None = None, /) -> LazyTensor | None: ...
    @overload
    def get(self, name: str, default: Default, /) -> LazyTensor | Default: ...
    def get(self, name: str, default: Any = None, /) -> Any:
        """The tensor, not loaded, or the default if there is none of that name."""
        return self[name] if name in self._places else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        return f"Checkpoint('{self.path}', tensors={len(self)}, files={len(self.files)}, nbytes={self.nbytes})"

    def _repr_html_(self) -> str:
        return overview(self).html()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.facts(name).nbytes for name in self)

    def file_of(self, name: str) -> str:
        """The name of the file that holds the tensor."""
        return self._place(name)[0]

    def folder_of(self, name: str) -> str:
        """The folder that the tensor is named after, "" if it is not."""
        return os.path.dirname(self.file_of(name)) if self._in_folders else ""

    def facts(self, name: str) -> TensorFacts:
        """Type, shape and size of a tensor, also of one that torch has no type for."""
        file, inner = self._place(name)
        return self.files[file].facts(inner)

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The content of the `config.json` (or Meta's `params.json`) beside the files; None if there is none."""
        return config_beside(self.location)

    @property
    def storages(self) -> Mapping[str, FileStorage]:
        """The open files' bytes, by file name."""
        return {name: file.storage for name, file in self.files.items()}

    @property
    def headers(self) -> Mapping[str, Header]:
        """The headers of the safetensors files, by file name."""
        return {name: file.header for name, file in self.files.items() if isinstance(file, SafetensorsFile)}


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    key: Key | None = None,
    verify: bool = False,
    prefer_safetensors: bool = True,
    skip_unreadable: bool = False,
) -> Checkpoint:
    """Open a checkpoint; reads headers and nothing else.

    Args:
        source: One of
            - a safetensors file, also one of OLMo, or a file of torch.save (.pt, .bin, .pth, .ckpt),
            - an index file,
            - a pattern such as "reshard-model_part-*.pt": the files that it finds, ordered by the numbers in their
              paths. If files have names in common, every tensor is called "{name}.part_{i}", i counting from 0;
            - a directory: with `model.safetensors`, else an index of safetensors files, else `pytorch_model.bin`, else
              an index of such files, else `adapter_model` or `diffusion_pytorch_model` in these formats, else all its
              safetensors files together, else `model.pt`, else the partitions of SwiftTransformer: a TorchScript
              archive for each tensor, which is called as the file is.
        key: Where in a file of torch.save, of OLMo or of `save_nested` the tensors are: "model" for
            `{"model": {...}, "args": {...}}`, "ema/model" or a sequence of keys further down, "" for the top. Not
            needed where only one dict has tensors. Without it, all tensors of `save_nested` are there, by their paths.
        verify: Whether to read files of torch.save once and compare them with their checksums; others have none.
        prefer_safetensors: Whether to read, in the place of one file of torch.save, the safetensors file of the same
            name beside it, if that was made of it (or, where it does not say so, is not older) and has the same names,
            types and shapes, and if the file is not to be verified. If there is no such file, the other one is read.
        skip_unreadable: Whether to leave out, with a warning, what stands among the tensors in a file of torch.save and
            is neither a tensor with plain bytes nor a plain value. Elsewhere in the file it may be in any case.

    Returns:
        A mapping of names to LazyTensors: `checkpoint["lm_head.weight"][:8].materialize()` reads eight rows. As a
        context manager it closes its files.

    Raises:
        FormatError: A header, a pickle or the index is not what its format says, or something among the tensors cannot
            be read. Nothing in a file is ever run.
        CheckpointError: There is nothing to open, a shard is missing, a shard lacks a tensor that the index says it
            has, two files hold one name, the key is missing or wrong, or the files are being replaced.
    """
    path = given_path(source)
    how: _How = {"key": key, "verify": verify, "skip_unreadable": skip_unreadable}
    with opening(path):
        return until_unchanged(lambda: _open(path, how, prefer_safetensors), lambda: _state(path), path)


def _state(path: Path) -> State:
    if not path.is_dir() and path.suffix in (_SUFFIX, *TORCH_SUFFIXES):
        return state_of([path, path.with_suffix(_SUFFIX)])
    return state_of_directory(path if path.is_dir() else path.parent)


class _How(TypedDict):
    """How files are opened: arguments of `Checkpoint`."""

    key: Key | None
    verify: bool
    skip_unreadable: bool


def _open(path: Path, how: _How, prefer_safetensors: bool) -> Checkpoint:
    if path.is_dir():
        check_settled(path)
        return _open_directory(path, how)
    if (
        path.suffix in TORCH_SUFFIXES
        and prefer_safetensors
        and not how["verify"]
        and (beside := _open_beside(path, how))
    ):
        return beside
    if not path.exists():
        if is_pattern(str(path)):
            return _open_parts(path, how)
        raise MissingError(no_such_path(path))
    if _INDEX.fullmatch(path.name) or _BIN_INDEX.fullmatch(path.name):
        check_settled(path.parent)
        return _open_index(path, path, how)
    if path.suffix == _SUFFIX or path.suffix in TORCH_SUFFIXES:
        return Checkpoint(path, {path.name: path}, **how)
    if fact := unread(path):
        raise CheckpointError(fact)
    raise CheckpointError(
        f"'{path}' is neither a directory nor a weight file ({', '.join((_SUFFIX, *TORCH_SUFFIXES))}) nor an index; "
        "pass one of these, or convert it first"
    )


def _open_beside(path: Path, how: _How) -> Checkpoint | None:
    opened = open_beside(
        path,
        lambda other: open_file_as_state(other, key=how["key"]),
        lambda itself: TorchStateFile(itself, **how),
        first_change,
    )
    if opened is None:
        return None
    other, file = opened
    return Checkpoint(other, {other.name: other}, opened={other.name: file})


def open_files(
    path: str | os.PathLike[str], files: Iterable[str | os.PathLike[str]], *, key: Key | None = None
) -> Checkpoint:
    """Open just these weight files as one checkpoint, called `path` in errors."""
    return Checkpoint(Path(path), _places(files), key=key)


def _places(files: Iterable[str | os.PathLike[str]]) -> dict[str, Path]:
    """Places by their names below the folder that they have in common."""
    places = [Path(os.path.abspath(file)) for file in files]
    top = os.path.commonpath([place.parent for place in places]) if places else ""
    return {os.path.relpath(place, top): place for place in places}


def _open_parts(pattern: Path, how: _How) -> Checkpoint:
    files = find_parts(str(pattern))
    for folder in {os.path.dirname(file) for file in files}:
        check_settled(Path(folder))
    return Checkpoint(pattern, _places(files), in_parts=True, **how)


def _open_directory(path: Path, how: _How) -> Checkpoint:
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    for kind, single, family in _SINGLES:
        if single in names:
            return Checkpoint(path, {single: path / single}, **how)
        indices = [name for name in names if family.fullmatch(name) and kind_of(name) == kind]
        if f"{single}.index.json" in indices:
            indices = [f"{single}.index.json"]
        if len(indices) == 1:
            return _open_index(path, path / indices[0], how)
        if indices:
            listed = ", ".join(f"'{name}'" for name in indices)
            raise CheckpointError(f"'{path}' has {len(indices)} index files ({listed}); pass the path of one of them")
    files = [name for name in names if name.endswith(_SUFFIX)]
    if not files and _OLMO_WEIGHTS in names:
        return Checkpoint(path, {_OLMO_WEIGHTS: path / _OLMO_WEIGHTS}, **how)
    if not files and (archives := find_archives(path, names)):
        return Checkpoint(path, archives, archives=True, **how)
    if not files and (folders := checkpoint_folders(path)):
        raise CheckpointError(
            f"'{path}' is made of several checkpoints ({in_words(folders)}); pass the directory of one, such as "
            f"'{path / folders[0]}'"
        )
    if not files:
        error = FileKindError if path.suffix in (_SUFFIX, *TORCH_SUFFIXES) else MissingError
        raise error(
            f"'{path}' holds no {_SUFFIX} file, no {_BIN_WEIGHTS} and no index; pass the directory of a checkpoint, or "
            "the path of a file"
        )
    _check_family(path, files)
    return Checkpoint(path, {name: path / name for name in files}, **how)


def _open_index(path: Path, index: Path, how: _How) -> Checkpoint:
    before = os.stat(index)
    weight_map = read_index(index).weight_map
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (index.parent / file).exists()]
    if missing:
        _check_same(index, before)
        listed = ", ".join(f"'{file}'" for file in missing[:5])
        raise MissingError(
            f"'{index}' names {len(files)} files, {len(missing)} of them are missing: {listed}; "
            "download or copy them, the checkpoint is not whole"
        )
    places = {file: index.parent / file for file in files}
    checkpoint = Checkpoint(path, places, weight_map, **how)
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
            raise MissingError(
                f"'{path}' has {len(numbers)} of the {count} shards of '{stem}', number {lost} is missing; "
                "download or copy it, the checkpoint is not whole"
            )
