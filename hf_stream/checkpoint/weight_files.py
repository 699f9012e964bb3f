"""One file of a checkpoint: its tensors by name, whatever its format."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, Protocol

from hf_stream.checkpoint.torch_file import TorchFile
from hf_stream.checkpoint.torch_state import Key, named_tensors
from hf_stream.errors import CheckpointError, FormatError
from hf_stream.formats import Header, header_nbytes, parse_header
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.dtypes import NAMES
from hf_stream.formats.torch_pickle import TensorRecord
from hf_stream.lazy import LazyTensor
from hf_stream.storage.file import FileStorage

SAFETENSORS_SUFFIX: Final = ".safetensors"
TORCH_SUFFIXES: Final = (".bin", ".ckpt", ".pt", ".pth")


class TensorFacts(NamedTuple):
    """What can be said of a tensor without reading it.

    Attributes:
        dtype: As safetensors calls it, such as "BF16", or torch if safetensors has no such type.
        shape: In elements; for "F4" two of torch's last dimension for each byte.
        nbytes: Of its elements, in a row.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class WeightFile(Protocol):
    """An open file of tensors.

    Attributes:
        storage: The file.
        names: Of its tensors, in their order.
        metadata: Free text entries.
    """

    @property
    def storage(self) -> FileStorage: ...

    @property
    def names(self) -> Collection[str]: ...

    @property
    def metadata(self) -> Mapping[str, str]: ...

    def facts(self, name: str) -> TensorFacts:
        """What is known of a tensor."""

    def lazy(self, name: str) -> LazyTensor:
        """The tensor, not loaded."""

    def close(self) -> None:
        """Close the file; what is read from it later is an error."""


class SafetensorsFile:
    """A file of the safetensors format; only its header is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.storage = FileStorage(path)
        self.header = _header(self.storage)
        self.names = self.header.tensors.keys()
        self.metadata = self.header.metadata

    def facts(self, name: str) -> TensorFacts:
        info = self.header.tensors[name]
        return TensorFacts(info.dtype, info.shape, info.nbytes)

    def lazy(self, name: str) -> LazyTensor:
        info = self.header.tensors[name]
        try:
            dtype, shape = info.torch_dtype, info.torch_shape
        except FormatError as error:
            raise FormatError(f"'{name}' in '{self.storage.name}': {error}") from None
        return LazyTensor.from_storage(self.storage, dtype, shape, info.start)

    def close(self) -> None:
        self.storage.close()


class TorchStateFile:
    """A file of torch.save, of which the tensors of one dict are taken: values alone, no parameters."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: Key | None = None,
        verify: bool = False,
        skip_unreadable: bool = False,
    ) -> None:
        self._file = TorchFile(path, verify=verify)
        self.storage = self._file.storage
        self.metadata: Mapping[str, str] = {}
        self._records: dict[str, TensorRecord] = {}
        with collector_paused():
            found = named_tensors(self._file.state, key, self.storage.name, skip_unreadable=skip_unreadable)
        for name, record in found.items():
            self._file.check_taken((name,), record)
            self._records[name] = record
        self.names = self._records.keys()

    def facts(self, name: str) -> TensorFacts:
        return facts_of(self._records[name])

    def lazy(self, name: str) -> LazyTensor:
        return self._file.plain(self._records[name])

    def close(self) -> None:
        self._file.close()


def facts_of(record: TensorRecord) -> TensorFacts:
    """What is known of a tensor in a file of torch.save."""
    dtype = NAMES.get(record.dtype, str(record.dtype).removeprefix("torch."))
    shape = record.size
    if dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    return TensorFacts(dtype, shape, math.prod(record.size) * record.dtype.itemsize)


def open_weight_file(
    path: str | os.PathLike[str], *, key: Key | None = None, verify: bool = False, skip_unreadable: bool = False
) -> WeightFile:
    """Open a file by its suffix.

    Raises:
        FormatError, CheckpointError: It cannot be used.
    """
    suffix = os.path.splitext(path)[1]
    if suffix in TORCH_SUFFIXES:
        return TorchStateFile(path, key=key, verify=verify, skip_unreadable=skip_unreadable)
    if key:
        raise CheckpointError(f"'{os.fspath(path)}' has no keys to follow, got {key!r}; files of torch.save have")
    return SafetensorsFile(path)


def _header(storage: FileStorage) -> Header:
    prefix = memoryview(bytearray(min(8, storage.nbytes)))
    storage.read_into(prefix, 0)
    whole = memoryview(bytearray(header_nbytes(prefix, storage.nbytes, storage.name)))
    storage.read_into(whole, 0)
    return parse_header(whole, storage.nbytes, storage.name)
