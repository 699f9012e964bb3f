"""Files of torch.save: the real ones in tests/data, what is in them, and how to make others out of them."""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from samples import same_bits

from hf_stream.checkpoint.torch_nesting import open_torch_file
from hf_stream.errors import CopyError, FormatError
from hf_stream.lazy import reads

FOLDER = Path(__file__).parent / "data" / "torch_save"
_ROWS = torch.contiguous_format


def files(*folders: str) -> list[str]:
    """Names of the real files, such as "good/plain_state_dict.pt"."""
    paths = [path for folder in folders for path in sorted((FOLDER / folder).iterdir())]
    return [str(path.relative_to(FOLDER)) for path in paths]


def expected(name: str) -> dict[str, Any]:
    """What the file holds, as the programs that made it wrote it down."""
    folder, file = name.split("/")
    return json.loads((FOLDER / f"expected_{folder}" / f"{file}.json").read_text())


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor in a nesting, with its path."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    elif isinstance(state, list | tuple):
        for at, value in enumerate(state):
            yield from leaves(value, (*path, at))


def outline(state: Any) -> list[Any]:
    """A nesting as the JSON files have it: types, order and plain values, "tensor" for each tensor."""
    kind = type(state).__name__
    if isinstance(state, torch.Tensor):
        return ["tensor"]
    if isinstance(state, dict):
        return [kind, [[outline(key), outline(value)] for key, value in state.items()]]
    if isinstance(state, list | tuple):
        return [kind, [outline(value) for value in state]]
    if isinstance(state, set):
        return [kind, [outline(value) for value in sorted(state)]]
    if isinstance(state, float):
        return [kind, state.hex()]
    if isinstance(state, bytes | bytearray):
        return [kind, state.hex()]
    return [kind, str(state) if isinstance(state, torch.dtype | torch.device | torch.layout) else state]


def assert_same_state(ours: Any, torchs: Any) -> None:
    """Lazies against what torch.load gives: structure, values, geometry, kinds of tensors, and what shares what."""
    assert outline(ours) == outline(torchs)
    pairs = list(zip(leaves(ours), leaves(torchs), strict=True))
    for (path, lazy), (_, real) in pairs:
        assert type(lazy).__name__ == "LazyTensor", path
        assert same_bits(lazy.materialize(), real.detach().resolve_conj().resolve_neg().clone(memory_format=_ROWS)), (
            path
        )
        assert isinstance(lazy, torch.nn.Parameter) == isinstance(real, torch.nn.Parameter), path
        assert isinstance(lazy, torch.nn.Buffer) == isinstance(real, torch.nn.Buffer), path
        assert lazy.requires_grad == real.requires_grad, path
        if not (real.is_conj() or real.is_neg()):
            assert (lazy.stride(), lazy.storage_offset()) == (real.stride(), real.storage_offset()), path
            shares = {other for (other, _), (_, tensor) in pairs if _shared(tensor, real)}
            ours_shares = {other for (other, tensor), _ in pairs if _same_leaf(tensor, lazy)}
            assert shares <= ours_shares, path
    sames = [[a is b for _, a in leaves(state) for _, b in leaves(state)] for state in (ours, torchs)]
    assert sames[0] == sames[1]


def _shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    plain = not any(tensor.is_conj() or tensor.is_neg() for tensor in (a, b))
    return (
        plain and a.untyped_storage().nbytes() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


def _same_leaf(a: Any, b: Any) -> bool:
    return a._source == b._source


def records_of(path: Path) -> dict[str, bytes]:
    """The content of each record, without the folder's name."""
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def write_records(path: Path, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """A zip archive of these records in the folder "archive"."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)
    return path


def write_pickle(path: Path, data: bytes, **storages: bytes) -> Path:
    """A file of torch.save with a pickle written by hand and storages "0", "1" and so on."""
    records = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
    return write_records(path, records | {f"data/{key.lstrip('_')}": content for key, content in storages.items()})


def torch_loads(path: Path) -> Any:
    """What torch gives for a file, or the error that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  (struct.error, zlib's, and whatever else damage leads to)
        return error


def mutated(content: bytes, number: int) -> bytes:
    """A real file with some damage, the same for the same number: bytes changed, cut out, doubled or moved.

    In half of the cases the damage is to what the records hold, and the archive around it is right.
    """
    chance = random.Random(number)
    is_zip = content[:2] == b"PK"
    if not is_zip or chance.random() < 0.5:
        return _damaged(content, chance)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = [(info, _content(archive, info)) for info in archive.infolist()]
    victim = "data.pkl" if chance.random() < 0.85 else chance.choice([info.filename for info, _ in records])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for info, data in records:
            hit = info.filename.endswith(victim)
            archive.writestr(
                zipfile.ZipInfo(info.filename), _damaged(data, chance) if hit else data, info.compress_type
            )
    return out.getvalue()


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as record:
        record._expected_crc = info.CRC or None  # some files have none
        return record.read()


def _damaged(content: bytes, chance: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        if not data:
            break
        at = chance.randrange(len(data))
        kind = chance.randrange(7)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at] = chance.randrange(256)
        elif kind == 2:
            data[at] = chance.choice(b"(.0KMJX}])tR\x85\x86\x87hrqQcbsuael\x81\x89\x88N")
        elif kind == 3:
            del data[at : at + chance.choice([1, 2, 4, 30])]
        elif kind == 4:
            data[at:at] = data[at : at + chance.choice([1, 2, 8, 40])]
        elif kind == 5:
            other = chance.randrange(len(data))
            size = chance.choice([1, 2, 4, 8])
            data[at : at + size] = data[other : other + size]
        else:
            data[at : at + 4] = chance.choice(
                [b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x01\x00\x00\x00"]
            )
    return bytes(data)


def fuzz(path: Path, number: int, place: Path) -> str:
    """Open a damaged copy of a file and read all of it: "refused" or "equal" to what torch gives.

    Fails if any other error is raised, if a byte outside of the records is read, or if torch refuses the file or gives
    something else.
    """
    place.write_bytes(mutated(path.read_bytes(), number))
    try:
        ours = open_torch_file(place)
        _assert_windows_inside(ours, place)
        for _, lazy in leaves(ours):
            lazy.materialize()
    except (FormatError, CopyError):
        return "refused"
    torchs = torch_loads(place)
    assert not isinstance(torchs, Exception), f"{path.name}, {number}: torch refuses it: {torchs!r}"
    assert_same_state(ours, torchs)
    return "equal"


def _assert_windows_inside(state: Any, place: Path) -> None:
    """Every byte that a tensor needs is one of a record's data, as Python's own reader of zip archives has it."""
    if place.read_bytes()[:2] != b"PK":
        return
    with zipfile.ZipFile(place) as archive:
        data = []
        for info in archive.infolist():
            archive.fp.seek(info.header_offset)
            sizes = struct.unpack("<2H", archive.fp.read(30)[26:])
            start = info.header_offset + 30 + sum(sizes)
            data.append((start, start + info.compress_size))
    for path, lazy in leaves(state):
        for region in reads([lazy]):
            if region.storage.name == str(place) and region.nbytes:
                start, stop = region.span
                assert any(first <= start and stop <= last for first, last in data), path
