"""Which file of torch.save a safetensors file was made of, as a note in its metadata: so a stale one is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hf_stream.checkpoint.weight_files import TORCH_SUFFIXES
from hf_stream.errors import FormatError
from hf_stream.formats.zip_records import SIGNATURE, read_records
from hf_stream.storage.file import FileStorage

ORIGIN: Final = "hf_stream.origin"

# Names and shapes may be the same all the same.
_CHANGED: Final = "changed by a layout"
_CHUNK: Final = 1 << 20


def origin_metadata(storage: FileStorage, *, as_it_is: bool = True) -> Mapping[str, str]:
    """The note on a file that is converted; nothing if it is none of torch.save, or its content is not to be told.

    Args:
        storage: The file.
        as_it_is: Whether its tensors keep their values, so that the new file may be read in its place.
    """
    if Path(storage.name).suffix not in TORCH_SUFFIXES:
        return {}
    origin = origin_of(storage) if as_it_is else _CHANGED
    return {} if origin is None else {ORIGIN: origin}


def origin_of(storage: FileStorage) -> str | None:
    """What tells the content of a file of torch.save: its size, and a hash.

    Of an archive, the hash is that of its directory, which has a CRC-32 of each record. None if it lacks one. Files
    from before torch 1.6 are read through.
    """

    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        storage.read_into(memoryview(data), offset)
        return bytes(data)

    digest = hashlib.sha256()
    if read(0, min(len(SIGNATURE), storage.nbytes)) == SIGNATURE:
        try:
            records = read_records(read, storage.nbytes, storage.name)
        except FormatError:
            return None
        if any(record.nbytes and not record.crc32 for record in records.values()):
            return None
        digest.update(json.dumps([*records.values()]).encode())
    else:
        for offset in range(0, storage.nbytes, _CHUNK):
            digest.update(read(offset, min(_CHUNK, storage.nbytes - offset)))
    return json.dumps({"nbytes": storage.nbytes, "sha256": digest.hexdigest()})
