"""Sources that change, that are where the destination is by another path, and that are opened by a relative path."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from file_facts import give_times_of
from safetensors.torch import load_file
from samples import files_of

import hf_stream
from hf_stream.errors import CheckpointError, CopyError
from hf_stream.storage import opened as opened_files

TENSORS = {name: torch.full((64,), float(n)) for n, name in enumerate("abc")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    hf_stream.save_checkpoint(TENSORS, tmp_path / "a", max_shard_size=256)
    (tmp_path / "a" / "config.json").write_text('{"x": 1}')
    return tmp_path / "a"


@pytest.fixture(params=[True, False], ids=["held", "reopened"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether descriptors are held."""
    if not request.param:
        monkeypatch.setattr(opened_files, "_are_few", lambda fd: False)
    return bool(request.param)


class _Then:
    """Does something when bytes have been written."""

    def __init__(self, action) -> None:
        self.action = action

    def update(self, n: int) -> None:
        self.action()


def _rewrite(file: Path) -> None:
    """Other values in place, of the same size and time."""
    status = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\1\2\3\4")
    give_times_of(status, file)


def test_a_source_that_changes_meanwhile_is_an_error_and_nothing_is_kept(source: Path, held: bool) -> None:
    del held
    shard = source / "model-00001-of-00003.safetensors"
    with pytest.raises(CopyError, match=r"model-00001-of-00003\.safetensors' was (replaced or )?changed while"):
        hf_stream.convert(source, source.parent / "b", max_shard_size=256, progress=_Then(lambda: _rewrite(shard)))
    assert os.listdir(source.parent) == ["a"]


def test_a_source_that_changed_after_it_was_opened_is_an_error(source: Path) -> None:
    checkpoint = hf_stream.open_checkpoint(source)
    _rewrite(source / "model-00002-of-00003.safetensors")
    with pytest.raises(CopyError, match=r"model-00002-of-00003\.safetensors' was changed"):
        hf_stream.convert(checkpoint, source.parent / "b")
    assert os.listdir(source.parent) == ["a"]


def test_what_lies_beside_other_weights_since_is_not_carried_along(source: Path) -> None:
    checkpoint = hf_stream.open_checkpoint(source)
    hf_stream.save_checkpoint({name: -tensor for name, tensor in TENSORS.items()}, source, max_shard_size=256)
    (source / "config.json").write_text('{"x": 2}')
    with pytest.raises(CheckpointError, match="was replaced while it was in use; open it again"):
        hf_stream.convert(checkpoint, source.parent / "b")
    assert os.listdir(source.parent) == ["a"]


def test_a_source_that_is_deleted_meanwhile_was_read_all_the_same(source: Path) -> None:
    def delete() -> None:
        for file in source.glob("*.safetensors"):
            file.unlink()

    hf_stream.convert(source, source.parent / "b", progress=_Then(delete))
    assert load_file(source.parent / "b" / "model.safetensors").keys() == TENSORS.keys()


@pytest.fixture
def mounted(source: Path) -> Iterator[Path]:
    """The source by another path, which no link tells."""
    place = source.parent / "mounted"
    place.mkdir()
    done = subprocess.run(["mount", "--bind", source, place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("name", ["", "model-00001-of-00003.safetensors"])
def test_a_mount_of_the_source_is_no_destination(source: Path, mounted: Path, name: str) -> None:
    before = files_of(source)
    with pytest.raises(CheckpointError, match="is where the source is"):
        hf_stream.convert(source / name, mounted / name)
    assert files_of(source) == before


def test_a_relative_path_is_that_of_the_folder_it_was_opened_in(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, held: bool
) -> None:
    del held
    monkeypatch.chdir(source.parent)
    checkpoint = hf_stream.open_checkpoint("a")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)

    loaded = hf_stream.materialize(checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    hf_stream.convert(checkpoint, "b")
    assert (elsewhere / "b" / "config.json").read_text() == '{"x": 1}'
    assert load_file("b/model.safetensors").keys() == TENSORS.keys()
    with pytest.raises(CheckpointError, match="is where the source is"):
        hf_stream.convert(checkpoint, source)
    assert str(checkpoint).startswith("Checkpoint('a',")


def test_so_is_one_of_a_file_with_compressed_records(source: Path, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    del held
    torch.save(TENSORS, source / "stored.pt")
    with (
        zipfile.ZipFile(source / "stored.pt") as stored,
        zipfile.ZipFile(source / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for record in stored.infolist():
            packed.writestr(record.filename, stored.read(record))
    monkeypatch.chdir(source)
    checkpoint = hf_stream.open_checkpoint("packed.pt")
    monkeypatch.chdir("/")
    loaded = hf_stream.materialize(checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_file_that_is_held_nowhere_and_replaced_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_files, "_are_few", lambda fd: False)
    checkpoint = hf_stream.open_checkpoint(source)
    hf_stream.save_checkpoint({name: -tensor for name, tensor in TENSORS.items()}, source, max_shard_size=256)
    with pytest.raises(CopyError, match="was replaced or changed while it was in use"):
        hf_stream.materialize(checkpoint)
