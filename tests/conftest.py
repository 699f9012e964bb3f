"""What tests of several folders share."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
import torch
from repeatable import (
    pytest_collectstart,
    pytest_fixture_setup,
    pytest_runtest_call,
    pytest_xdist_auto_num_workers,
)

from hf_stream.storage import FileStorage

__all__ = [
    "pytest_collectstart",
    "pytest_fixture_setup",
    "pytest_runtest_call",
    "pytest_xdist_auto_num_workers",
]

# Shells start what runs in the background with interrupts ignored, and so would every process that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class CountingFile(FileStorage):
    """A file that counts how often each of its bytes is read and written."""

    def __init__(self, path, mode="r"):
        super().__init__(path, mode)
        self.read_counts = torch.zeros(self.nbytes, dtype=torch.int16)
        self.write_counts = torch.zeros(self.nbytes, dtype=torch.int16)

    def read_scattered(self, buffers, offset):
        super().read_scattered(buffers, offset)
        self.read_counts[offset : offset + sum(map(len, buffers))] += 1

    def write_gathered(self, buffers, offset):
        super().write_gathered(buffers, offset)
        self.write_counts[offset : offset + sum(map(len, buffers))] += 1

    def copy_to(self, target, offset, target_offset, nbytes):
        moved = super().copy_to(target, offset, target_offset, nbytes)
        self.read_counts[offset : offset + moved] += 1
        if isinstance(target, CountingFile):
            target.write_counts[target_offset : target_offset + moved] += 1
        return moved

    def window(
        self, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], writable: bool = False
    ) -> torch.Tensor | None:
        tensor = super().window(offset, dtype, size, stride, writable)
        if tensor is not None and tensor.numel():
            item = dtype.itemsize
            once = [n if step else 1 for n, step in zip(size, stride, strict=True)]
            counts = self.write_counts if writable else self.read_counts
            counts.as_strided((*once, item), (*(step * item for step in stride), 1), offset).add_(1)
        return tensor


@pytest.fixture(scope="session")
def counting_file() -> type[CountingFile]:
    """The class: `counting_file(path, "r+")` is a FileStorage with `read_counts` and `write_counts` per byte."""
    return CountingFile


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything durable is done as ever, but for the wait itself: machines are not switched off in unit tests.

    What does wait, and what it is good for, is tested in integration_tests/reliability.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: None)
