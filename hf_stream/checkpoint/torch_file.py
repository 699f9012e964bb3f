"""Files of torch.save, opened without loading and without running anything: a tensor is a window on a record's bytes.

Only the zip directory and the pickle are read. What they say of sizes and places is checked here, by hf_stream: every
record against its storage, every tensor against its record.
"""

from __future__ import annotations

import logging
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from hf_stream.checkpoint.torch_legacy import read_legacy
from hf_stream.errors import ArchiveError, PickleError
from hf_stream.formats.budget import MIN_TAKEN, RATE, Budget
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.nested_paths import Keys, shown_path
from hf_stream.formats.torch_pickle import StorageRecord, TensorRecord, TorchPickle
from hf_stream.formats.torchscript_pickle import attributes_of, read_torchscript_pickle
from hf_stream.formats.zip_records import SIGNATURE, Record, read_records
from hf_stream.lazy import LazyTensor
from hf_stream.lazy.sources import Leaf
from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage
from hf_stream.storage.inflated import InflatedFile, check_crc32, inflate

logger = logging.getLogger(__name__)

# A pickle says where tensors are, and some plain values; the largest models have some megabytes of that.
_MAX_PICKLE: Final = 1 << 30
# Such pickles compress to a fifth. One that is much smaller would need far more memory than the file has bytes.
_MAX_INFLATION: Final = 16
_SMALL: Final = 1 << 20
_MAX_MARK: Final = 1000
# Tied weights take bytes only where they are written, and there are few names for each as a rule.
_TIED: Final = 16
_CHUNK: Final = 1 << 20
_MARKS: Final = {
    "byteorder": rb"little",
    "version": rb"([1-9]|10)\n?",
    ".data/version": rb"([1-9]|10)\n?",
    ".format_version": rb"[0-9]\n?",
    ".data/serialization_id": rb"[ -~]*\n?",
    ".storage_alignment": rb"[0-9]{1,9}\n?",
}


class TorchFile:
    """An open file of torch.save.

    Args:
        path: The file.
        verify: Whether to read everything once and compare it with the file's checksums.
        storage: The same file, where it is open already.

    Attributes:
        storage: The file.
        state: What was saved, with a `TensorRecord` for each tensor.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, verify: bool = False, storage: FileStorage | None = None
    ) -> None:
        self.storage = storage or FileStorage(path)
        self.name = self.storage.name
        # Equal storages of the pickle are one; here is where each of them is.
        self._places: dict[str, tuple[Storage, int]] = {}
        self._inflated: InflatedFile | None = None
        self._taken = 0.0
        # As text: their numbers could be chosen so that all have one hash.
        self._windows: set[str] = set()
        with collector_paused():
            if self._read(0, min(len(SIGNATURE), self.storage.nbytes)) == SIGNATURE:
                self.state = self._open_zip(verify)
            else:
                self.state, self._places = read_legacy(self.storage)
                if verify:
                    logger.warning(
                        "'%s' is from before torch 1.6 and has no checksums: it cannot be verified", self.name
                    )

    def close(self) -> None:
        """Close the file, and give back the space of what was inflated."""
        self.storage.close()
        if self._inflated is not None:
            self._inflated.close()

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.storage.read_into(memoryview(data), offset)
        return bytes(data)

    def _open_zip(self, verify: bool) -> Any:
        records = read_records(self._read, self.storage.nbytes, self.name)
        # All records lie in one folder, that of the first one.
        folder, slash, _ = next(iter(records), "").partition("/")
        found = {name[len(folder) + 1 :]: record for name, record in records.items() if name.startswith(folder + "/")}
        if not slash or "data.pkl" not in found:
            raise ArchiveError(f"'{self.name}' is a zip archive without 'data.pkl': torch.save did not write it")
        self._check_marks(found)
        if verify:
            self._verify(records.values())
        data, name = self._content(found["data.pkl"]), f"{self.name}: {folder}/data.pkl"
        budget = Budget(min(len(data), self.storage.nbytes))
        if "constants.pkl" in found:
            state, storages = read_torchscript_pickle(data, name, budget)
            state = attributes_of(state, name, budget)
        else:
            reader = TorchPickle(budget)
            state, stop = reader.read(data, name)
            storages = reader.storages
            if stop != len(data):
                raise PickleError(f"'{name}' has {len(data) - stop} bytes after its end. Get the file again.")
        self._find_places(storages.values(), found)
        return state

    def _check_marks(self, found: Mapping[str, Record]) -> None:
        """Refuse what torch would read in another way, or not at all."""
        if "version" not in found and ".data/version" not in found:
            raise ArchiveError(f"'{self.name}' has no record 'version': torch cannot read it either. Get it again.")
        for mark, pattern in _MARKS.items():
            if mark not in found:
                continue
            content = self._content(found[mark]) if found[mark].nbytes <= _MAX_MARK else None
            if content is None or not re.fullmatch(pattern, content):
                said = f"has {found[mark].nbytes} bytes" if content is None else f"says {content!r:.40}"
                raise ArchiveError(
                    f"'{self.name}': the record '{mark}' {said}, which is not known; "
                    "if the file is right, load it with torch and save it again"
                )

    def _content(self, record: Record) -> bytes:
        """All of a small record, with its checksum compared."""
        if record.nbytes > _MAX_PICKLE:
            raise ArchiveError(
                f"'{self.name}': record '{record.name}' of {record.nbytes} bytes is no pickle of tensors"
            )
        if record.nbytes > max(_SMALL, _MAX_INFLATION * record.stored_nbytes):
            raise ArchiveError(
                f"'{self.name}': record '{record.name}' would grow from {record.stored_nbytes} to {record.nbytes} "
                "bytes, as no pickle of tensors does; if the file is right, load it with torch and save it again"
            )
        content = b"".join(self._pieces(record))
        check_crc32(self.name, record, zlib.crc32(content))
        return content

    def _pieces(self, record: Record) -> Iterator[bytes]:
        if record.deflated:
            yield from inflate(self.storage, record)
            return
        for start in range(0, record.nbytes, _CHUNK):
            yield self._read(record.start + start, min(_CHUNK, record.nbytes - start))

    def _verify(self, records: Iterable[Record]) -> None:
        unknown = 0
        for record in records:
            crc32 = 0
            for piece in self._pieces(record):
                crc32 = zlib.crc32(piece, crc32)
            check_crc32(self.name, record, crc32)
            unknown += record.crc32 == 0 and crc32 != 0
        if unknown:
            logger.warning("'%s' has no CRC-32 for %d of its records: they cannot be verified", self.name, unknown)

    def _find_places(self, storages: Iterable[StorageRecord], found: Mapping[str, Record]) -> None:
        deflated: list[tuple[str, Record]] = []
        for storage in storages:
            record = found.get(f"data/{storage.key}")
            if record is None:
                raise ArchiveError(
                    f"'{self.name}' has no record 'data/{storage.key}', which its pickle names. Get it again."
                )
            if record.nbytes != storage.nbytes:
                raise ArchiveError(
                    f"'{self.name}': record '{record.name}' has {record.nbytes} bytes, but its storage "
                    f"{storage.nbytes}. The file is damaged: get it again."
                )
            if record.deflated:
                deflated.append((storage.key, record))
            self._places[storage.key] = self.storage, record.start
        if deflated:
            self._inflated = inflated = InflatedFile(self.storage, [record for _, record in deflated])
            self._places |= {key: (inflated, inflated.start_of(n)) for n, (key, _) in enumerate(deflated)}

    def plain(self, record: TensorRecord) -> LazyTensor:
        """The tensor's values alone."""
        storage, base = self._places[record.storage.key]
        elements = torch.empty(record.storage.nbytes // record.dtype.itemsize, dtype=record.dtype, device="meta")
        lazy = LazyTensor(elements.as_strided(record.size, record.stride, record.offset), Leaf(storage, base))
        if record.conj:
            lazy = lazy.conj_physical()  # type: ignore[assignment]
        if record.neg:
            lazy = lazy.neg()  # type: ignore[assignment]
        return lazy

    def check_taken(self, keys: Keys, record: TensorRecord) -> None:
        """Count the bytes of the tensor at `keys`, which is taken from the file, each time that it is.

        Raises:
            FormatError: All together they are much larger than the file.
        """
        nbytes = math.prod(record.size) * record.dtype.itemsize
        window = f"{record.storage.key} {record.dtype} {record.offset} {record.size} {record.stride}"
        self._taken += nbytes if window not in self._windows else nbytes / _TIED
        self._windows.add(window)
        limit = max(MIN_TAKEN, RATE * self.storage.nbytes)
        if self._taken > limit:
            raise PickleError(
                f"'{self.name}': with '{shown_path(keys)}' of {record.dtype} and size {list(record.size)}, strides "
                f"{list(record.stride)}, on a storage of {record.storage.nbytes} bytes, its tensors come to "
                f"{int(self._taken)} bytes, and the limit for a file of {self.storage.nbytes} bytes is {limit}. If the "
                "file is right, load it with torch, clone() what is expanded or shares bytes, and save it again"
            )
