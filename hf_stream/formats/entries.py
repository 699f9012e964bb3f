"""What the JSON of a safetensors header may say: the entries of the tensors, and how they fill the file.

The library's leniences are kept: an entry may be a list of its three fields, hold further fields, or be repeated.
Errors are plain `ValueError`s with the fact; the caller adds the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from hf_stream.formats.dtypes import BITS
from hf_stream.formats.strict_json import Pairs, nesting

METADATA: Final = "__metadata__"
MAX_NESTING: Final = 127

_FIELDS: Final = ("dtype", "shape", "data_offsets")
_USIZE_MAX: Final = 2**64 - 1


class Entry(NamedTuple):
    """A tensor as its header describes it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_entries(header: Pairs) -> tuple[dict[str, str], list[tuple[str, Entry]]]:
    """Metadata, and the tensors in the order of their bytes, which are shown to lie there without gap or overlap.

    Of a repeated tensor name the last entry counts, but each must be well formed; `__metadata__` may stand only once.
    """
    metadata: dict[str, str] | None = None
    entries: dict[str, Entry] = {}
    for key, value in header:
        if key != METADATA:
            entries[key] = _entry(key, value)
        elif metadata is None:
            metadata = _metadata(value)
        else:
            raise ValueError(f"'{METADATA}' is repeated")
    placed = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    _check_gapless(placed)
    return metadata or {}, placed


def tensor_nbytes(key: str, dtype: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor takes; errors name it by `key`."""
    # Multiplied in the library's order, which refuses [2**63, 2, 0] for its overflow but not [0, 2**63, 2].
    bits = 1
    for factor in (*shape, BITS[dtype]):
        bits *= factor
        if bits > _USIZE_MAX:
            raise ValueError(f"tensor '{key}': {dtype} of shape {list(shape)} has more than 2**64 bits")
    if bits % 8:
        raise ValueError(f"tensor '{key}': {dtype} of shape {list(shape)} takes {bits} bits, which fill no whole bytes")
    return bits // 8


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Pairs):
        raise ValueError(f"'{METADATA}' is not an object of strings")
    metadata = {}
    for key, text in value:
        if not isinstance(text, str):
            raise ValueError(f"'{METADATA}' entry '{key}' is not a string")
        metadata[key] = text
    return metadata


def _entry(key: str, value: object) -> Entry:
    dtype, shape, offsets = _fields(key, value)
    if isinstance(dtype, Pairs) and len(dtype) == 1 and dtype[0][1] is None:
        dtype = dtype[0][0]  # {"F32": null}: the library's other spelling of "F32"
    if not isinstance(dtype, str):
        raise ValueError(f"tensor '{key}': dtype is not a string")
    if dtype not in BITS:
        raise ValueError(f"tensor '{key}': unknown dtype {dtype!r:.40}, known are {', '.join(BITS)}")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError(f"tensor '{key}': shape is not a list of sizes (whole numbers below 2**64)")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"tensor '{key}': data_offsets are not two offsets (whole numbers below 2**64)")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _fields(key: str, value: object) -> tuple[object, object, object]:
    """dtype, shape and data_offsets of a tensor's entry, which is an object or a list of the three."""
    if isinstance(value, list) and len(value) == len(_FIELDS):
        dtype, shape, offsets = value
        return dtype, shape, offsets
    if not isinstance(value, Pairs):
        raise ValueError(f"tensor '{key}': entry is not an object with {', '.join(_FIELDS)}")
    fields: dict[str, object] = {}
    for field, content in value:
        if field not in _FIELDS:
            if nesting(content) + 2 > MAX_NESTING:
                raise ValueError(f"tensor '{key}': '{field}' nests deeper than {MAX_NESTING} levels")
        elif field in fields:
            raise ValueError(f"tensor '{key}': '{field}' is repeated")
        else:
            fields[field] = content
    if len(fields) < len(_FIELDS):
        raise ValueError(f"tensor '{key}': no {', '.join(field for field in _FIELDS if field not in fields)}")
    return fields["dtype"], fields["shape"], fields["data_offsets"]


def _check_gapless(placed: list[tuple[str, Entry]]) -> None:
    end = 0
    for key, (dtype, shape, start, stop) in placed:
        if start != end or stop < start:
            raise ValueError(f"tensor '{key}': data_offsets [{start}, {stop}], but the tensor before it ends at {end}")
        end = stop
        wanted = tensor_nbytes(key, dtype, shape)
        if stop - start != wanted:
            raise ValueError(f"tensor '{key}': {stop - start} bytes, but {dtype} of shape {list(shape)} takes {wanted}")
