"""Files that hold a nested state, whoever wrote them: opened as that state, or as the tensors in one dict of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_stream.checkpoint.nested_leaves import LeafReader
from hf_stream.checkpoint.nested_structure import STRUCTURE, read_structure
from hf_stream.checkpoint.olmo_state import olmo_state, olmo_tensors
from hf_stream.checkpoint.torch_file import TorchFile
from hf_stream.checkpoint.torch_nesting import nesting_of
from hf_stream.checkpoint.torch_state import Key, named_tensors
from hf_stream.checkpoint.weight_files import (
    SAFETENSORS_SUFFIX,
    TORCH_SUFFIXES,
    SafetensorsFile,
    TensorFacts,
    WeightFile,
    open_weight_file,
)
from hf_stream.errors import CheckpointError, FormatError
from hf_stream.formats.dtypes import NAMES
from hf_stream.formats.nested import decode_structure
from hf_stream.formats.olmo_names import are_olmo_names
from hf_stream.lazy import LazyTensor
from hf_stream.storage.file import FileStorage


class StateFile:
    """An open file of which some tensors are taken, under names that need not be those it has for them."""

    def __init__(self, storage: FileStorage, tensors: Mapping[str, LazyTensor]) -> None:
        self.storage = storage
        self.names = tensors.keys()
        self.metadata: Mapping[str, str] = {}
        self._tensors = tensors

    def facts(self, name: str) -> TensorFacts:
        tensor = self._tensors[name]
        dtype = NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        shape = tuple(tensor.shape)
        if dtype == "F4" and shape:
            shape = (*shape[:-1], shape[-1] * 2)
        return TensorFacts(dtype, shape, tensor.numel() * tensor.itemsize)

    def lazy(self, name: str) -> LazyTensor:
        tensor = self._tensors[name]
        if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
            tensor = tensor.detach()  # type: ignore[assignment]
        return tensor

    def close(self) -> None:
        self.storage.close()


class _Lazies(Mapping[str, LazyTensor]):
    """The tensors of a file; the same object each time."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file
        self._made: dict[str, LazyTensor] = {}

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._made:
            self._made[name] = self._file.lazy(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.names)

    def __len__(self) -> int:
        return len(self._file.names)


def open_file(
    path: str | os.PathLike[str], *, key: Key | None = None, verify: bool = False, skip_unreadable: bool = False
) -> WeightFile:
    """Open a file of any format as named tensors.

    Args:
        path: Its suffix says the format. A safetensors file of OLMo is known by its names.
        key: Where the tensors are, in files that hold a nesting. None is the dict of tensors, if there is only one; of
            a file of `save_nested`, all tensors by their paths.
        verify: Whether to compare files of torch.save with their checksums.
        skip_unreadable: Whether to leave out what stands among the tensors in files of torch.save and cannot be read.

    Raises:
        FormatError, CheckpointError: It cannot be used.
    """
    if os.path.splitext(path)[1] in TORCH_SUFFIXES:
        return open_weight_file(path, key=key, verify=verify, skip_unreadable=skip_unreadable)
    file = SafetensorsFile(path)
    if are_olmo_names(file.names) or (key is not None and STRUCTURE in file.metadata):
        return _file_at(file, key)
    if key:
        raise CheckpointError(f"'{os.fspath(path)}' has no keys to follow, got {key!r}; files of nested states have")
    return file


def open_file_as_state(path: str | os.PathLike[str], *, key: Key | None = None) -> WeightFile:
    """Open a safetensors file of any kind as a file of torch.save with the same state would be opened."""
    file = SafetensorsFile(path)
    if are_olmo_names(file.names) or STRUCTURE in file.metadata:
        return _file_at(file, key)
    if key:
        raise CheckpointError(f"it has no keys to follow, and {key!r} is wanted")
    return file


@dataclass(frozen=True)
class OpenState:
    """A nesting with LazyTensors, and the file they are in."""

    storage: FileStorage
    state: Any


def open_state(path: Path, *, skip_unreadable: bool = False) -> OpenState | None:
    """The nesting in a file of torch.save or of OLMo, with LazyTensors; None for all other files."""
    if path.suffix in TORCH_SUFFIXES:
        torch_file = TorchFile(path)
        return OpenState(torch_file.storage, nesting_of(torch_file, skip_unreadable=skip_unreadable))
    if path.suffix != SAFETENSORS_SUFFIX:
        return None
    file = SafetensorsFile(path)
    if not are_olmo_names(file.names):
        return None
    return OpenState(file.storage, olmo_state(_Lazies(file), file.storage.name, skip_unreadable=skip_unreadable))


def is_structured(path: Path) -> bool:
    """Whether `save_nested` wrote the file."""
    return STRUCTURE in SafetensorsFile(path).metadata


def open_safetensors_state(path: Path, *, skip_unreadable: bool = False) -> Any:
    """The nesting in one safetensors file of any kind; one that has no structure is a dict of tensors."""
    file = SafetensorsFile(path)
    lazies = _Lazies(file)
    if are_olmo_names(file.names):
        return olmo_state(lazies, file.storage.name, skip_unreadable=skip_unreadable)
    if STRUCTURE in file.metadata:
        return _structured(file, lazies)
    return dict(lazies)


def _file_at(file: SafetensorsFile, key: Key | None) -> StateFile:
    lazies, name = _Lazies(file), file.storage.name
    state = olmo_tensors(lazies, name) if STRUCTURE not in file.metadata else _structured(file, lazies)
    tensors = named_tensors(state, key, name)
    return StateFile(file.storage, tensors)


def _structured(file: SafetensorsFile, lazies: Mapping[str, LazyTensor]) -> Any:
    try:
        tree = read_structure(file.metadata[STRUCTURE], lazies)
        return decode_structure(tree, LeafReader(lazies, _no_array))
    except FormatError as error:
        raise FormatError(f"'{file.storage.name}': {error}") from None


def _no_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A stand-in: arrays are no tensors, and are not read."""
    return np.empty(0)
