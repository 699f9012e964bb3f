from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import files_of

import hf_stream
from hf_stream.checkpoint import staging as staging_module
from hf_stream.checkpoint.staging import Staging
from hf_stream.errors import CopyError
from hf_stream.storage import durability

_TENSORS = {f"t{n}": torch.full((500,), float(n)) for n in range(4)}


class Journal:
    """What was flushed, renamed and removed, in this order, by file names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        rename, unlink = os.rename, os.unlink

        def fsync(fd: int) -> None:
            self.events.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

        def renamed(source: Any, target: Any, **folders: int) -> None:
            rename(source, target, **folders)
            self.events.append(("name", os.path.basename(target)))

        def unlinked(path: Any, **folders: int) -> None:
            unlink(path, **folders)
            self.events.append(("remove", os.path.basename(path)))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "unlink", unlinked)

    def first(self, *event: str) -> int:
        return self.events.index(event)

    def last(self, *event: str) -> int:
        return len(self.events) - 1 - self.events[::-1].index(event)


def test_a_new_directory_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(monkeypatch)
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "a" / "out", max_shard_size=4100)
    named = journal.first("name", "out")
    for name in sorted(files_of(tmp_path / "a" / "out")):
        assert journal.first("flush", name) < named
        if name.endswith(".safetensors"):
            assert journal.first("flush", name) < journal.first("name", name) < journal.last("flush", "files")
    assert journal.last("flush", "files") < named
    assert journal.first("flush", tmp_path.name) < named  # which "a" was made in
    assert journal.last("flush", "a") > named


def test_old_weights_go_when_the_new_ones_and_the_journal_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_stream.save_checkpoint(_TENSORS, tmp_path, max_shard_size=4100)
    new = {name: tensor + 1 for name, tensor in _TENSORS.items()}
    journal = Journal(monkeypatch)
    hf_stream.save_checkpoint(new, tmp_path, max_shard_size=6100)
    removed = journal.first("remove", "model.safetensors.index.json")
    assert removed == min(journal.first(*event) for event in journal.events if event[0] == "remove")
    for name in sorted(files_of(tmp_path)):
        assert journal.first("flush", name) < removed
    assert journal.first("flush", "journal.json.new") < journal.first("name", "journal.json")
    noted = journal.last("flush", ".hf-stream")
    assert journal.first("name", "journal.json") < noted < removed
    in_place = journal.last("name", "model.safetensors.index.json")
    cleared = journal.last("remove", "journal.json")
    assert any(event == ("flush", tmp_path.name) for event in journal.events[in_place:cleared])
    assert not hf_stream.verify(new, tmp_path)


def test_one_file_takes_the_place_of_another_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_stream.save_checkpoint(_TENSORS, tmp_path)
    journal = Journal(monkeypatch)
    hf_stream.save_checkpoint({"x": torch.ones(2)}, tmp_path)
    assert ("remove", "model.safetensors") not in journal.events
    assert journal.first("flush", "model.safetensors") < journal.last("name", "model.safetensors")
    assert journal.last("flush", tmp_path.name) > journal.last("name", "model.safetensors")


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_nothing_is_flushed_where_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "source", max_shard_size=4100)
    durable = False if how == "argument" else None
    if how == "environment":
        monkeypatch.setenv("HF_STREAM_DURABLE", "0")
    journal = Journal(monkeypatch)
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "a", durable=durable)
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "a", max_shard_size=4100, durable=durable)
    hf_stream.save_nested([_TENSORS], tmp_path / "b.safetensors", durable=durable)
    hf_stream.convert(tmp_path / "source", tmp_path / "c", durable=durable)
    with hf_stream.CheckpointWriter(tmp_path / "d", {"x": torch.ones(2)}, durable=durable) as writer:
        writer.write("x", torch.ones(2))
    assert not [event for event in journal.events if event[0] == "flush"]
    # What the caller says counts more than the environment.
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "e", durable=True)
    assert [event for event in journal.events if event[0] == "flush"]


def test_a_file_that_the_disk_does_not_take_is_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "old")
    before = files_of(tmp_path)

    def fsync(fd: int) -> None:
        if "model-00002" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    for directory in ("old", "new"):
        with pytest.raises(
            CopyError, match=r"model-00002.*cannot be written to the disk: Input/output error"
        ) as caught:
            hf_stream.save_checkpoint(_TENSORS, tmp_path / directory, max_shard_size=4100)
        assert caught.value.errno == errno.EIO
    assert files_of(tmp_path) == before
    with pytest.raises(CopyError):
        hf_stream.convert(tmp_path / "old", tmp_path / "new", max_shard_size=4100)
    kept = set(files_of(tmp_path)) - set(before)
    assert not any("model-00002" in name for name in kept)


def test_a_word_that_says_neither_yes_nor_no_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_STREAM_DURABLE", "maybe")
    with pytest.raises(ValueError, match="HF_STREAM_DURABLE is 'maybe'"):
        hf_stream.save_checkpoint(_TENSORS, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("was_durable", [True, False])
@pytest.mark.parametrize("rebooted", [True, False])
def test_what_was_not_on_the_disk_is_not_taken_up_after_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_durable: bool, rebooted: bool
) -> None:
    first = Staging(tmp_path / "out", "f", durable=was_durable)
    with first.create("w.pt", 3) as storage:
        storage.write_from(memoryview(b"old"), 0)
    first.finish("w.pt")
    first.abandon(keep=True)
    if rebooted:
        monkeypatch.setattr(staging_module, "boot_id", lambda: "another")
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    again = Staging(tmp_path / "out", "f", durable=True)
    assert again.finished == ({"w.pt"} if was_durable or not rebooted else set())
    # From now on it counts as being on the disk, so it must be.
    assert ("w.pt" in flushed) == (not was_durable and not rebooted)
    again.abandon()


def test_verifying_a_conversion_reads_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "source")
    events: list[tuple[str, str]] = []
    advise = os.posix_fadvise

    def name_of(fd: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

    def fadvise(fd: int, start: int, length: int, advice: int) -> None:
        assert (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        events.append(("drop", name_of(fd)))
        advise(fd, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(("flush", name_of(fd))))
    hf_stream.convert(tmp_path / "source", tmp_path / "out", max_shard_size=4100, verify=True, durable=False)
    shards = [name for name in files_of(tmp_path / "out") if name.endswith(".safetensors")]
    assert len(shards) == 2
    for shard in shards:
        assert events.index(("flush", shard)) < events.index(("drop", shard))


def test_a_directory_that_cannot_be_flushed_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "out")
    assert not hf_stream.verify(_TENSORS, tmp_path / "out")


@pytest.mark.parametrize("exists", [False, True])
def test_a_checkpoint_that_is_in_place_and_may_not_last_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    out = tmp_path / "out"
    if exists:
        hf_stream.save_checkpoint(_TENSORS, out)

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") in (str(tmp_path), str(out)) and list(out.glob("model-00002*")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CopyError, match="is in place, but may not outlive a loss of power: Input/output error"):
        hf_stream.save_checkpoint(_TENSORS, out, max_shard_size=4100)
    assert not hf_stream.verify(_TENSORS, out)


def test_modes_of_old_files_are_kept_but_for_special_rights(tmp_path: Path) -> None:
    hf_stream.save_checkpoint(_TENSORS, tmp_path)
    (tmp_path / "model.safetensors").chmod(0o6640)
    hf_stream.save_checkpoint(_TENSORS, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o7777 == 0o640


def test_no_thread_outlives_a_save(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "out", max_shard_size=4100)
    with pytest.raises(ZeroDivisionError), hf_stream.CheckpointWriter(tmp_path / "w", _TENSORS):
        raise ZeroDivisionError
    assert set(threading.enumerate()) == before
    dropped = Staging(tmp_path / "x")
    dropped.create("w.pt", 3).close()
    (started,) = set(threading.enumerate()) - before
    del dropped
    started.join(10)
    assert not started.is_alive()


def test_a_save_at_the_end_of_a_process_needs_no_thread(tmp_path: Path) -> None:
    program = (
        "import atexit, sys, torch, hf_stream\n"
        "tensors = {'x': torch.ones(500), 'y': torch.zeros(500)}\n"
        "atexit.register(hf_stream.save_checkpoint, tensors, sys.argv[1], max_shard_size=2100)\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "out"], check=True)
    assert hf_stream.open_checkpoint(tmp_path / "out").nbytes == 4000


def test_a_save_that_can_start_no_thread_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    journal = Journal(monkeypatch)
    hf_stream.save_checkpoint(_TENSORS, tmp_path / "out", max_shard_size=4100)
    assert not hf_stream.verify(_TENSORS, tmp_path / "out")
    for name in files_of(tmp_path / "out"):
        assert journal.first("flush", name) < journal.first("name", "out")


def test_what_a_file_holds_is_written_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threading.Event()

    def start_writing(fd: int, offset: int, nbytes: int, flags: int) -> int:
        assert (offset, nbytes, flags) == (0, 0, 2)
        seen.set()
        return 0

    monkeypatch.setattr(durability, "_sync_file_range", lambda: start_writing)
    staging = Staging(tmp_path / "out")
    staging.create("w.pt", 3).close()
    assert seen.wait(10)
    staging.abandon()
