"""Copies between random windows equal what torch's own `copy_` does, and read nothing else."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_stream.copying import Copy, Region, execute
from hf_stream.copying import schedule as schedule_module
from hf_stream.storage import FileStorage, MemoryStorage, Storage

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, torch.float4_e2m1fn_x2, torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex128]

_numbers = itertools.count()


class PlainStorage(Storage):
    """Bytes that can be neither mapped nor addressed, as something remote would be."""

    def __init__(self, content: bytes):
        self.name = "plain"
        self.content = bytearray(content)
        self.nbytes = len(content)

    def read_into(self, buffer, offset):
        buffer[:] = self.content[offset : offset + len(buffer)]

    def write_from(self, buffer, offset):
        self.content[offset : offset + len(buffer)] = buffer


@st.composite
def windows(draw, size: tuple[int, ...], expand: bool) -> tuple[tuple[int, ...], int]:
    """Strides for `size` in a larger permuted tensor, and the elements that they span."""
    order = draw(st.permutations(range(len(size))))
    stride = [0] * len(size)
    step = 1
    for dim in reversed(order):
        if expand and draw(st.integers(0, 9)) == 0:
            continue
        stride[dim] = step
        step *= size[dim] * draw(st.sampled_from([1, 1, 1, 2])) + draw(st.sampled_from([0, 0, 0, 1]))
    return tuple(stride), 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


@st.composite
def regions(draw, size: tuple[int, ...], dtype: torch.dtype, writes: bool):
    """A description of a region in a storage with random content."""
    kind = draw(st.sampled_from(["file", "memory", "plain"]))
    stride, elements = draw(windows(size, expand=not writes))
    offset = draw(st.sampled_from([0, 3, 8, 4088])) if kind != "memory" else 16 * draw(st.integers(0, 2))
    return kind, dtype, size, stride, offset, elements * dtype.itemsize + offset + draw(st.integers(0, 5))


def open_storage(kind: str, content: torch.Tensor, directory: Path, counting_file) -> Storage:
    if kind == "memory":
        return MemoryStorage(content.clone())
    if kind == "plain":
        return PlainStorage(bytes(content.tolist()))
    path = directory / str(next(_numbers))
    path.write_bytes(bytes(content.tolist()))
    return counting_file(path, "r+")


def content_of(storage: Storage) -> torch.Tensor:
    buffer = bytearray(storage.nbytes)
    storage.read_into(memoryview(buffer), 0)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def view_of(content: torch.Tensor, region: Region) -> tuple[torch.Tensor, torch.Tensor]:
    """(aligned copy of the bytes from the region's offset on, the region's window on it)."""
    part = content[region.offset :].clone()
    usable = part[: len(part) // region.dtype.itemsize * region.dtype.itemsize]
    return part, usable.view(region.dtype).as_strided(region.size, region.stride)


def without_nan(content: torch.Tensor, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Zeros for the NaNs: which NaN a cast makes of a NaN differs between torch's own vector and scalar loops."""
    part = content[offset:].clone()
    values = part[: len(part) // dtype.itemsize * dtype.itemsize].view(dtype)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values.view(raw)[values.to(torch.float64).isnan()] = 0
    content = content.clone()
    content[offset:] = part
    return content


def random_bytes(nbytes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)


SIZES = st.lists(st.sampled_from([1, 2, 3, 5, 8, 40, 96]), max_size=4).filter(lambda size: math.prod(size) <= 10_000)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("files")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), size=SIZES, dtype=st.sampled_from(DTYPES), buffer_size=st.sampled_from([1, 5000, 1 << 26]))
def test_same_dtype_copies_move_every_bit(data, size, dtype, buffer_size, directory, counting_file):
    size = tuple(size)
    ends = [data.draw(regions(size, dtype, writes)) for writes in (False, True)]
    made = []
    for seed, (kind, dtype_, size_, stride, offset, nbytes) in enumerate(ends):
        storage = open_storage(kind, random_bytes(nbytes, dtype, seed), directory, counting_file)
        made.append(Region(storage, dtype_, size_, stride, offset))
    src, dst = made
    expected = content_of(dst.storage).clone()
    # The truth in bytes: torch does not copy every dtype.
    item = dtype.itemsize
    steps = [(*(step * item for step in region.stride), 1) for region in made]
    source = content_of(src.storage).as_strided((*size, item), steps[0], src.offset)
    expected.as_strided((*size, item), steps[1], dst.offset).copy_(source)
    for storage in {src.storage, dst.storage}:
        if isinstance(storage, FileStorage):
            storage.read_counts.zero_()
    execute([Copy(src, dst, name="x")], buffer_size=buffer_size, threads=2)
    if isinstance(src.storage, FileStorage) and buffer_size == 1 << 26:
        wanted = torch.zeros(src.storage.nbytes, dtype=torch.int16)
        once = [n if step else 1 for n, step in zip(size, src.stride, strict=True)]
        wanted.as_strided((*once, item), steps[0], src.offset).fill_(1)
        assert torch.equal(src.storage.read_counts, wanted)
    assert torch.equal(content_of(dst.storage), expected)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    size=SIZES,
    dtypes=st.lists(st.sampled_from(FLOATS), min_size=2, max_size=4),
    buffer_size=st.sampled_from([1, 5000, 1 << 26]),
)
def test_casts_equal_torch(data, size, dtypes, buffer_size, directory, counting_file):
    size = tuple(size)
    made = []
    for dtype, writes in ((dtypes[0], False), (dtypes[-1], True)):
        kind, dtype_, size_, stride, offset, nbytes = data.draw(regions(size, dtype, writes))
        content = without_nan(random_bytes(nbytes, dtype, int(writes)), dtype, offset)
        storage = open_storage(kind, content, directory, counting_file)
        made.append(Region(storage, dtype_, size_, stride, offset))
    src, dst = made
    before = content_of(dst.storage).clone()
    _, value = view_of(content_of(src.storage), src)
    for dtype in dtypes[1:]:
        value = value.to(dtype)
    part, target = view_of(before, dst)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dst.dtype.itemsize]
    target.view(raw).copy_(value.view(raw))
    before[dst.offset :] = part
    execute([Copy(src, dst, tuple(dtypes[1:-1]), "x")], buffer_size=buffer_size, threads=2)
    after = content_of(dst.storage)
    assert torch.equal(after[: dst.offset], before[: dst.offset])
    # Overflow on the way can make NaNs (inf to float8).
    assert torch.equal(without_nan(after, dst.dtype, dst.offset), without_nan(before, dst.dtype, dst.offset))


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.sampled_from([1, 2, 7, 64, 512, 3000]), min_size=2, max_size=4),
    rows=st.sampled_from([1, 2, 50, 301]),
    turned=st.booleans(),
    kind=st.sampled_from(["file", "memory"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    threads=st.sampled_from([1, 3]),
)
def test_parts_side_by_side_equal_cat(widths, rows, turned, kind, dtype, threads, directory, counting_file):
    path = directory / str(next(_numbers))
    parts, copies = [], []
    with FileStorage.create(path, sum(widths) * rows * dtype.itemsize + 6) as target:
        for seed, width in enumerate(widths):
            content = without_nan(random_bytes(rows * width * 4, torch.float32, seed), torch.float32, 0)
            storage = open_storage(kind, content, directory, counting_file)
            stride = (1, rows) if turned else (width, 1)
            src = Region(storage, torch.float32, (rows, width), stride, 0)
            parts.append(view_of(content, src)[1].to(dtype))
            at = 6 + sum(widths[:seed]) * dtype.itemsize
            copies.append(Copy(src, Region(target, dtype, (rows, width), (sum(widths), 1), at), (), str(seed)))
        execute(copies, threads=threads)
        written = content_of(target)
    assert torch.equal(written[6:], bits(torch.cat(parts, 1)))
    assert not written[:6].any()


def test_large_transpose_reads_each_byte_once_and_writes_each_once(directory, counting_file, monkeypatch):
    content = random_bytes(700 * 900 * 2, torch.int16, 0)
    src = open_storage("file", content, directory, counting_file)
    dst = open_storage("file", torch.zeros_like(content), directory, counting_file)
    src.read_counts.zero_()
    execute(
        [Copy(Region(src, torch.int16, (900, 700), (1, 900), 0), Region.contiguous(dst, torch.int16, (900, 700)))],
        buffer_size=200_000,
    )
    assert src.read_counts.min() == src.read_counts.max() == 1
    assert dst.write_counts.min() == dst.write_counts.max() == 1
    assert torch.equal(content_of(dst).view(torch.int16).view(900, 700), content.view(torch.int16).view(700, 900).T)


def test_neighbours_in_a_file_are_read_with_one_call(directory, monkeypatch):
    path = directory / str(next(_numbers))
    path.write_bytes(bytes(range(200)))
    calls = []

    class Spy(FileStorage):
        def read_scattered(self, buffers, offset):
            calls.append((offset, [len(buffer) for buffer in buffers]))
            super().read_scattered(buffers, offset)

    with Spy(path) as file:
        tensors = [torch.zeros(10, dtype=torch.uint8) for _ in range(15)]
        copies = [
            Copy(Region.contiguous(file, torch.uint8, (10,), 10 * i), Region.of(t)) for i, t in enumerate(tensors)
        ]
        del copies[7]
        execute(reversed(copies))
    assert calls == [(0, [10] * 7), (80, [10] * 7)]
    assert tensors[14].tolist() == list(range(140, 150))
    assert tensors[7].tolist() == [0] * 10


def test_file_to_file_without_copy_file_range(directory, monkeypatch, counting_file):
    content = random_bytes(100_000, torch.uint8, 0)
    src = open_storage("file", content, directory, counting_file)
    dst = open_storage("file", torch.zeros_like(content), directory, counting_file)

    def unsupported(*args):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.copy_file_range", unsupported)
    src.read_counts.zero_()
    region = [Region.contiguous(storage, torch.uint8, (100_000,)) for storage in (src, dst)]
    execute([Copy(*region)], buffer_size=30_000)
    assert src.read_counts.min() == src.read_counts.max() == 1
    assert torch.equal(content_of(dst), content)


def test_repeats_of_what_cannot_be_mapped_are_read_once():
    src, dst = PlainStorage(bytes(range(8))), torch.zeros(6, 4, dtype=torch.int32)
    reads = []
    real = src.read_into
    src.read_into = lambda buffer, offset: (reads.append((offset, len(buffer))), real(buffer, offset))
    execute([Copy(Region(src, torch.int16, (6, 4), (0, 1), 0), Region.of(dst))])
    assert reads == [(0, 8)]
    assert torch.equal(dst, torch.arange(8, dtype=torch.uint8).view(torch.int16).int().expand(6, 4))


def test_memory_views_with_an_offset_and_parameters(directory):
    base = torch.arange(100, dtype=torch.float32)
    dst = torch.zeros(5, 4)
    execute([Copy(Region.of(torch.nn.Parameter(base)[20:60:2].view(4, 5).T), Region.of(dst))])
    assert torch.equal(dst, base[20:60:2].view(4, 5).T)


def test_large_copies_are_split_among_threads(directory, monkeypatch):
    monkeypatch.setattr(schedule_module, "MOVE_BYTES", 1 << 20)
    src = random_bytes(9 << 20, torch.uint8, 0)
    path = directory / str(next(_numbers))
    path.write_bytes(src.numpy().tobytes())
    dst = torch.zeros_like(src)
    with FileStorage(path) as file:
        execute([Copy(Region.contiguous(file, torch.uint8, src.shape), Region.of(dst))], threads=3)
    assert torch.equal(src, dst)


def test_nothing_to_do():
    execute([])
    execute([Copy(Region.of(torch.empty(0, 3)), Region.of(torch.empty(0, 3)))])
