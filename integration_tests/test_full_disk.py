"""A disk without room for all shards: an error before any data is written, and nothing left behind."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hf_stream
from hf_stream.errors import CheckpointError

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {error}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


class NoData:
    """Fails when the first byte of data has moved."""

    def update(self, n: int) -> None:
        raise AssertionError(f"{n} bytes were written")


def free(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bfree * status.f_frsize


def tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.full((MIB,), n, dtype=torch.uint8) for n in range(count)}


@pytest.mark.parametrize("max_shard_size", ["1MB", "3MB", "1GB"])
def test_saving_more_than_there_is_room_for(small_disk: Path, max_shard_size: str) -> None:
    before = free(small_disk)
    with pytest.raises(CheckpointError, match=r"cannot reserve .*: No space left on device"):
        hf_stream.save_checkpoint(tensors(9), small_disk / "a/b", max_shard_size=max_shard_size, progress=NoData())
    assert list(small_disk.iterdir()) == []
    assert free(small_disk) == before


def test_an_old_checkpoint_stays_and_room_beside_it_is_needed(small_disk: Path) -> None:
    hf_stream.save_checkpoint(tensors(5), small_disk, max_shard_size="2MB")
    before = sorted(small_disk.rglob("*"))
    with pytest.raises(CheckpointError, match="No space left"):
        hf_stream.save_checkpoint(tensors(4), small_disk, progress=NoData())
    assert sorted(small_disk.rglob("*")) == before
    assert not hf_stream.verify(tensors(5), small_disk)


@pytest.mark.parametrize("resume", [True, False])
def test_converting_to_a_full_disk(small_disk: Path, tmp_path: Path, resume: bool) -> None:
    hf_stream.save_checkpoint(tensors(9), tmp_path / "a")
    for target in ("b", "b.safetensors"):
        with pytest.raises(CheckpointError, match="No space left"):
            hf_stream.convert(
                tmp_path / "a", small_disk / target, max_shard_size="1MB", resume=resume, progress=NoData()
            )
        assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_keeps_finished_shards_until_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    hf_stream.save_checkpoint(tensors(4), tmp_path / "a")

    class Stop:
        left = 2

        def update(self, n: int) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf_stream.convert(tmp_path / "a", small_disk / "b", max_shard_size=MIB, progress=Stop())
    gc.collect()  # what the traceback of the interrupt refers to holds files, and their space
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(free(small_disk) - MIB // 2))
    with pytest.raises(CheckpointError, match="No space left"):
        hf_stream.convert(tmp_path / "a", small_disk / "b", max_shard_size=MIB, progress=NoData())
    # How many shards were whole when the interrupt came is up to the threads; never all four.
    kept = {path.name: path.stat().st_ino for path in (small_disk / ".b.hf-stream/files").iterdir()}
    assert 1 <= len(kept) <= 3
    ballast.unlink()
    hf_stream.convert(tmp_path / "a", small_disk / "b", max_shard_size=MIB)
    assert {name: (small_disk / "b" / name).stat().st_ino for name in kept} == kept
    assert not hf_stream.verify(tensors(4), small_disk / "b")


def test_small_files_that_do_not_fit(small_disk: Path, tmp_path: Path) -> None:
    hf_stream.save_checkpoint(tensors(6), tmp_path / "a")
    (tmp_path / "a/tokenizer.json").write_bytes(bytes(3 * MIB))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json': cannot be written: No space left"):
        hf_stream.convert(tmp_path / "a", small_disk / "b", progress=NoData())
    assert list(small_disk.iterdir()) == []
