"""Any program of ops gives on lazies what eager PyTorch gives, and movements read just the bytes they need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from programs import DTYPES, Step, bits, computations, joins, movements, seeded, shapes

from hf_stream.lazy import LazyTensor
from hf_stream.storage.file import FileStorage

# Failing programs shrink for minutes: without that, the first one found is shown as it is.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


class CountingFile(FileStorage):
    """Counts how often each byte is asked for, by reads and by windows."""

    def count(self) -> torch.Tensor:
        if not hasattr(self, "counts"):
            self.counts = torch.zeros(self.nbytes, dtype=torch.int32)
        return self.counts

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        self.count()[offset : offset + sum(map(len, buffers))] += 1
        super().read_scattered(buffers, offset)

    def window(self, offset, dtype, size, stride, writable=False):  # type: ignore[no-untyped-def]
        tensor = super().window(offset, dtype, size, stride, writable)
        if tensor is None or writable:
            return tensor
        # Stride 0 shows one element again and again: it is read once.
        size = [min(n, 1) if step == 0 else n for n, step in zip(size, stride, strict=True)]
        where = torch.arange(self.nbytes).as_strided(
            (*size, dtype.itemsize), (*(step * dtype.itemsize for step in stride), 1), offset
        )
        self.count()[where.flatten()] += 1
        return tensor

    def copy_to(self, target: FileStorage, offset: int, target_offset: int, nbytes: int) -> int:
        moved = super().copy_to(target, offset, target_offset, nbytes)
        self.count()[offset : offset + moved] += 1
        return moved


def on_file(tensor: torch.Tensor, path: Path, start: int) -> tuple[LazyTensor, CountingFile]:
    """The tensor as a lazy one on a file, `start` bytes in, with a margin behind it."""
    path.write_bytes(b"\xaa" * start + bits(tensor) + b"\xbb" * 16)
    storage = CountingFile(path)
    return LazyTensor.from_storage(storage, tensor.dtype, tensor.shape, start), storage


def both(step: Step, real: torch.Tensor, lazy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on both; none where eager torch cannot do it (an op that a dtype lacks, say)."""
    try:
        result = step(real)
    except (RuntimeError, NotImplementedError, IndexError):
        return real, lazy
    return result, step(lazy)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@settings(max_examples=400, deadline=None, phases=PHASES)
@given(data=st.data())
def test_programs_equal_eager_torch_bit_for_bit(scratch: Path, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    reals = [seeded(data.draw(shapes()), dtype, seed) for seed in range(data.draw(st.integers(1, 3)))]
    lazies: list[torch.Tensor] = []
    for i, real in enumerate(reals):
        place = data.draw(st.sampled_from(["memory", "view", "file", "unaligned"]))
        if place == "memory":
            lazies.append(LazyTensor.from_tensor(real))
        elif place == "view" and real.dim():
            bigger = torch.cat([real, real, real], 0)
            lazies.append(LazyTensor.from_tensor(bigger[len(real) : 2 * len(real)]))
        else:
            lazies.append(on_file(real, scratch / f"{i}", 8 if place == "file" else 5)[0])
    for _ in range(data.draw(st.integers(0, 3))):
        for i, real in enumerate(reals):
            step = data.draw(st.one_of(movements(tuple(real.shape)), computations(tuple(real.shape), real.dtype)))
            reals[i], lazies[i] = both(step, real, lazies[i])
            assert lazies[i].shape == reals[i].shape
            assert lazies[i].dtype == reals[i].dtype
    if data.draw(st.integers(0, 3)):
        join = data.draw(joins(reals))
        try:
            joined = join(reals)
        except RuntimeError:  # dtypes that do not promote
            pass
        else:
            reals, lazies = [joined], [join(lazies)]
    for _ in range(data.draw(st.integers(0, 4))):
        for i, real in enumerate(reals):
            shape = tuple(real.shape)
            step = data.draw(st.one_of(movements(shape), movements(shape), computations(shape, real.dtype)))
            reals[i], lazies[i] = both(step, real, lazies[i])
    for real, lazy in zip(reals, lazies, strict=True):
        assert isinstance(lazy, LazyTensor)
        result = lazy.materialize()
        assert (result.shape, result.dtype) == (real.shape, real.dtype)
        assert bits(result) == bits(real)
        transposed = torch.empty(real.shape[::-1], dtype=real.dtype).permute(list(range(real.dim()))[::-1])
        transposed.copy_(lazy)
        assert bits(transposed) == bits(real)


@settings(max_examples=400, deadline=None, phases=PHASES)
@given(data=st.data())
def test_movements_read_each_needed_byte_once_and_no_other(scratch: Path, data: st.DataObject) -> None:
    # Elements are their own addresses: the result says which were needed.
    count = data.draw(st.integers(1, 3))
    reals, lazies, files = [], [], []
    for i in range(count):
        shape = data.draw(shapes())
        real = (torch.arange(torch.Size(shape).numel(), dtype=torch.int32) + (i << 20)).reshape(shape)
        lazy, file = on_file(real, scratch / f"counted{i}", data.draw(st.sampled_from([0, 8, 6])))
        reals.append(real)
        lazies.append(lazy)
        files.append((file, lazy._source.base))  # type: ignore[union-attr]
    for _ in range(data.draw(st.integers(0, 3))):
        for i, real in enumerate(reals):
            step = data.draw(movements(tuple(real.shape)))
            reals[i], lazies[i] = both(step, real, lazies[i])
    join = data.draw(joins(reals))
    real, lazy = join(reals), join(lazies)
    for _ in range(data.draw(st.integers(0, 4))):
        step = data.draw(movements(tuple(real.shape)))
        real, lazy = both(step, real, lazy)
    result = lazy.materialize()
    assert torch.equal(result, real)
    for i, (file, base) in enumerate(files):
        needed = torch.zeros(file.nbytes, dtype=torch.int32)
        for element in real.flatten().tolist():
            if element >> 20 == i:
                at = base + (element & 0xFFFFF) * 4
                needed[at : at + 4] += 1
        assert needed.max() <= 1
        assert torch.equal(file.count(), needed)
