"""Archives of one tensor against torch.jit.load and the zip readers of torch and Python."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from archives import jit_load
from hypothesis import given
from hypothesis import strategies as st
from samples import random_bits, same_bits

from hf_stream.errors import FormatError
from hf_stream.formats.archive_names import archive_attribute, archive_name, missing_partition
from hf_stream.formats.torchscript import TensorArchive, tensor_archive
from hf_stream.formats.zip_records import read_records

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
]
FOUR_GIB = 1 << 32


def whole_file(archive: TensorArchive, content: bytes) -> bytes:
    data = bytearray(archive.nbytes)
    pieces = [(0, archive.prefix), (archive.tensor.start, content), *archive.closing(zlib.crc32(content))]
    for at, piece in pieces:
        data[at : at + len(piece)] = piece
    assert len(data) == archive.nbytes
    return bytes(data)


def written(path: Path, attribute: str, tensor: torch.Tensor) -> Path:
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    path.write_bytes(whole_file(tensor_archive(path.stem, attribute, tensor.dtype, tensor.shape), content))
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (4, 0, 5), (2, 3, 4), (1, 70000)], ids=str)
def test_torch_loads_the_very_tensor(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, dtype)

    loaded = jit_load(written(tmp_path / "a.weight.tp_0.pt", "a.weight", tensor))

    found = getattr(loaded, "a.weight")
    assert same_bits(found, tensor)
    assert found.stride() == tensor.stride()
    assert found.storage_offset() == 0
    assert found.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    assert not list(loaded.parameters())
    assert not list(loaded.buffers())


@pytest.mark.parametrize("attribute", ["weight", "decoder.layers.0.fc1.bias", "for.1 - x", "ends."])
def test_attributes_may_be_called_almost_anything(tmp_path: Path, attribute: str) -> None:
    loaded = jit_load(written(tmp_path / "x.pt", attribute, torch.arange(3)))

    assert getattr(loaded, attribute).tolist() == [0, 1, 2]


@pytest.mark.parametrize("attribute", ['quo"te', "back\\slash", "line\nbreak", "uml\u00e4ut", "training"])
def test_attributes_that_code_cannot_hold_are_refused(attribute: str) -> None:
    with pytest.raises(FormatError, match="cannot be an attribute"):
        tensor_archive("x", attribute, torch.float32, (1,))


def test_types_that_torchscript_lacks_are_refused() -> None:
    with pytest.raises(FormatError, match=r"'w': TorchScript files cannot hold torch.float8_e4m3fn"):
        tensor_archive("x", "w", torch.float8_e4m3fn, (1,))


@given(st.text("abc._-0", min_size=1, max_size=60).filter(lambda stem: stem not in (".", "..")), st.integers(0, 300))
def test_the_archive_is_a_sound_zip(stem: str, numel: int) -> None:
    content = random_bits((numel,), torch.uint8).numpy().tobytes()
    data = whole_file(tensor_archive(stem, "w", torch.uint8, (numel,)), content)

    records = read_records(lambda offset, nbytes: data[offset : offset + nbytes], len(data), stem)

    assert next(iter(records)) == f"{stem}/data/0"
    assert all(record.start % 64 == 0 and not record.deflated for record in records.values())
    for record in records.values():
        assert record.crc32 == zlib.crc32(data[record.start : record.start + record.nbytes])


def test_python_finds_no_fault_and_no_time(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    one, other = (written(tmp_path / name / "x.weight.pt", "x.weight", tensor) for name in _folders(tmp_path))

    with zipfile.ZipFile(one) as archive:
        assert archive.testzip() is None
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert one.read_bytes() == other.read_bytes()


def _folders(top: Path) -> list[str]:
    for name in ("one", "other"):
        (top / name).mkdir()
    return ["one", "other"]


@pytest.mark.parametrize("nbytes", [FOUR_GIB - 2, FOUR_GIB - 1, FOUR_GIB, FOUR_GIB + 100])
def test_tensors_beyond_four_gib(tmp_path: Path, nbytes: int) -> None:
    """The file has a hole where the tensor is."""
    archive = tensor_archive("x", "w", torch.uint8, (nbytes,))
    path = tmp_path / "x.pt"
    with open(path, "wb") as file:
        file.write(archive.prefix)
        for at, piece in archive.closing(0x12345678):
            file.seek(at)
            file.write(piece)
    assert path.stat().st_size == archive.nbytes

    with open(path, "rb") as file, zipfile.ZipFile(path) as by_python:

        def read(offset: int, count: int) -> bytes:
            file.seek(offset)
            return file.read(count)

        record = read_records(read, archive.nbytes, "x")["x/data/0"]
        info = by_python.getinfo("x/data/0")
    by_torch = torch._C.PyTorchFileReader(str(path))

    assert (record.start, record.nbytes, record.crc32) == (archive.tensor.start, nbytes, 0x12345678)
    assert (info.file_size, info.compress_size, info.CRC) == (nbytes, nbytes, 0x12345678)
    assert by_torch.get_record_offset("data/0") == archive.tensor.start
    assert by_torch.get_record("version") == b"3\n"


def test_names_of_files() -> None:
    assert archive_name("a.b.weight") == ("a.b.weight.pt", "a.b.weight")
    assert archive_name("a.bias.tp_10") == ("a.bias.tp_10.pt", "a.bias")
    assert archive_attribute("a.bias.tp_10.pt") == "a.bias"
    assert [archive_attribute(file) for file in ("optimizer.pt", "a.weight", ".a.weight.pt", "a.weight.tp_x.pt")] == [
        None
    ] * 4


@pytest.mark.parametrize("name", ["a", "a.weights", "a/b.weight", ".weight", "a.weight.tp_01", "x" * 260 + ".weight"])
def test_names_that_are_no_files_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="cannot be the name of a TorchScript file"):
        archive_name(name)


def test_a_lost_partition_is_found() -> None:
    files = [f"{name}.tp_{i}.pt" for name in ("a.weight", "b.bias") for i in range(3)] + ["c.weight.pt"]

    assert missing_partition(files) is None
    assert missing_partition([file for file in files if file != "b.bias.tp_1.pt"]) == ("b.bias", 1, 3)
    assert missing_partition([file for file in files if file != "a.weight.tp_2.pt"]) == ("a.weight", 2, 3)
