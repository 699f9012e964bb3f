"""What a conversion reads and writes, known from headers alone, and what it finds where it is to write."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_stream.checkpoint.carried import NewConfig, with_dtype
from hf_stream.checkpoint.files import CheckpointFiles, ShardFile
from hf_stream.checkpoint.folder import Folder
from hf_stream.checkpoint.mapping import SAFETENSORS, AnyLayout, FileFormat, config_after
from hf_stream.checkpoint.matches import Matches
from hf_stream.checkpoint.open import Checkpoint
from hf_stream.checkpoint.paths import given_path
from hf_stream.checkpoint.prospect import Prospect
from hf_stream.checkpoint.recovery import kept_files
from hf_stream.checkpoint.replacement import states_before
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.errors import CheckpointError
from hf_stream.lazy import fingerprint, reads, working_set


@dataclass(frozen=True)
class Kept:
    """Whole files of an interrupted run.

    Attributes:
        path: The directory that they are in, under names of our own.
        shards: Which of the files to be they are.
    """

    path: Path
    shards: tuple[ShardFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(shard.header.nbytes for shard in self.shards)


@dataclass(frozen=True)
class Outcome:
    """What running a conversion has done.

    Attributes:
        written: The weight files that this run has written.
        reused: Those that it has taken over from an interrupted one.
        replaced: Files that were at the destination and are gone or replaced: bytes by name.
    """

    written: tuple[ShardFile, ...]
    reused: tuple[ShardFile, ...]
    replaced: Mapping[str, int]


@dataclass(frozen=True, repr=False)
class Conversion:
    """What a conversion reads and writes, known from headers alone.

    Attributes:
        source: The checkpoint that is read.
        tensors: The tensors to write, by name, none of them loaded.
        files: The weight files to write.
        carried: Other files of the source directory that go along.
        dtype: What floating-point tensors become, or None.
        file: The name of the one file that is to be written, or None for a directory.
        layout: What made the tensors of the source's, or None.
        matches: How many tensors each rule of the layout has found.
        nested: Whether the whole of a nesting is written, as `save_nested` would.
        format: Of the weight files.
        folders: Those of the checkpoints that the source is made of, "" being its own directory.
    """

    source: Checkpoint
    tensors: Mapping[str, torch.Tensor]
    files: CheckpointFiles
    carried: tuple[Path, ...]
    dtype: torch.dtype | None
    file: str | None = None
    layout: AnyLayout | None = None
    format: FileFormat = SAFETENSORS
    nested: bool = False
    matches: Matches = field(default_factory=Matches)
    folders: tuple[str, ...] = ("",)

    def __repr__(self) -> str:
        return (
            f"Conversion('{self.source.path}', tensors={len(self.tensors)}, files={len(self.files.shards)}, "
            f"nbytes={self.files.nbytes})"
        )

    def __str__(self) -> str:
        return "\n".join(map(str, Prospect(self).tables))

    def _repr_html_(self) -> str:
        return "\n".join(table.html() for table in Prospect(self).tables)

    @property
    def directory(self) -> Path:
        """Where the source's files are."""
        return self.source.directory

    def nbytes_read(self) -> dict[str, int]:
        """Bytes to read of each source file, by path."""
        nbytes = {storage.name: 0 for storage in self.source.storages.values()}
        for region in reads(self.tensors.values()):
            nbytes[region.storage.name] = nbytes.get(region.storage.name, 0) + region.nbytes
        return nbytes

    def peak_nbytes(self, buffer_size: int = DEFAULT_BUFFER_SIZE) -> int:
        """Anonymous memory needed at most, beyond the program itself: the buffer and one deferred operation."""
        return buffer_size + working_set(self.tensors.values())

    @property
    def new_dtype(self) -> torch.dtype | None:
        """The dtype that most of the weights have from now on; None if it is the one before."""
        after = _main_dtype(self.tensors.values())
        return self.dtype or (after if after != _main_dtype(self.source.values()) else None)

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """What goes into config.json: the changes of the layout, and the new dtype."""
        config = config_after(self.layout, config)
        return config if self.new_dtype is None else with_dtype(config, self.new_dtype)

    @property
    def new_configs(self) -> Mapping[str, NewConfig]:
        """What becomes of the config.json in each folder, where anything may."""
        if self.new_dtype is None and not hasattr(self.layout, "new_config"):
            return {}
        configs: dict[str, NewConfig] = {"": self.new_config}
        if self.dtype is not None:
            configs |= dict.fromkeys(filter(None, self.folders), functools.partial(with_dtype, dtype=self.dtype))
        return configs

    def fingerprint(self) -> str:
        """What the files will hold, as a hash: of headers, names, expressions and the source files' identities."""
        # Names once more, as headers do not say which of two tensors of one shape is whose.
        digest = hashlib.sha256(repr(list(self.tensors)).encode())
        digest.update(fingerprint(self.tensors.values()).encode())
        for shard in self.files.shards:
            digest.update(shard.name.encode() + shard.prefix)
        return digest.hexdigest()

    def kept(self, destination: str | os.PathLike[str]) -> Kept | None:
        """What an interrupted run of this very conversion has left for the next one to take up; None if nothing."""
        path = kept_files(self.directory_of(destination), self.fingerprint(), self.file)
        if path is None:
            return None
        return Kept(path.parent, tuple(shard for shard in self.files.shards if (path / shard.name).is_file()))

    def replaced(self, destination: str | os.PathLike[str]) -> dict[str, int]:
        """Files at the destination that go, or are replaced, when the new ones come: bytes by name."""
        directory = self.directory_of(destination)
        if not directory.is_dir():
            return {}
        names = [*(shard.name for shard in self.files.shards), *self.files.small, *map(self.name_of, self.carried)]
        with Folder(directory) as folder:
            states = states_before(folder, names, self.files.family if self.file is None else None)
        return {name: state.nbytes for name, state in states.items() if state is not None}

    def name_of(self, carried: Path) -> str:
        """What a carried file is called in the destination."""
        return str(carried.relative_to(self.directory))

    def of_files(self, shards: Iterable[ShardFile]) -> Conversion:
        """The part of this conversion that writes just these of its files."""
        tensors = {name: self.tensors[name] for shard in shards for name in shard.header.tensors}
        return dataclasses.replace(self, tensors=tensors)

    def directory_of(self, destination: str | os.PathLike[str]) -> Path:
        """The directory that a destination is, or that the one file goes into."""
        path = given_path(destination)
        return path if self.file is None else path.parent

    def check_destination(self, destination: str | os.PathLike[str]) -> None:
        """Refuse what cannot be right, before anything is written.

        Raises:
            CheckpointError: The destination is where the source is, or there is nothing to write.
        """
        if not self.tensors and not self.nested:
            raise CheckpointError(
                f"'{os.fspath(destination)}': no tensors are left to write; use a layout that keeps some"
            )
        _check_apart(self.source, self.directory_of(destination), self.file)


def _main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The floating-point dtype that has the most elements."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            elements[tensor.dtype] += tensor.numel()
    return max(elements, key=elements.__getitem__, default=None)


def _check_apart(source: Checkpoint, directory: Path, file: str | None) -> None:
    """Refuse to replace the source: after an interruption nobody could tell whether it has been converted already."""
    paths = [str(source.location), *(storage.path for storage in source.storages.values())]
    if file is None:
        paths += [os.path.dirname(path) for path in paths if os.path.isfile(path)]
    target = directory / (file or "")
    if any(map(functools.partial(_is_same, target), paths)):
        raise CheckpointError(f"'{target}' is where the source is; convert to another place")


def _is_same(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to one place; a mount may give it another path."""
    return os.path.realpath(a) == os.path.realpath(b) or (
        os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)
    )
