from __future__ import annotations

import base64
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import DTYPES, random_bits, same_bits
from torch_files import records_of, write_records

import hf_stream
from hf_stream import open_checkpoint
from hf_stream.checkpoint import open_files
from hf_stream.errors import CheckpointError, CopyError, FormatError


def _sharded(directory: Path) -> dict[str, torch.Tensor]:
    """Three tensors in three shards, whose names sort the other way round than their shards."""
    tensors = {name: random_bits((4, 3), torch.float32, n) for n, name in enumerate("cba")}
    hf_stream.save_checkpoint(tensors, directory, max_shard_size=48)
    return tensors


def _index(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


def _edit_index(directory: Path, **changes: str | None) -> None:
    index = json.loads(_index(directory).read_text())
    index["weight_map"] = {k: v for k, v in {**index["weight_map"], **changes}.items() if v is not None}
    _index(directory).write_text(json.dumps(index))


def _shard(number: int) -> str:
    return f"model-0000{number}-of-00003.safetensors"


def test_a_file_is_read_as_safetensors_reads_it(tmp_path: Path) -> None:
    tensors = {f"{dtype} \N{SNOWMAN}": random_bits((2, 3, 2), dtype, 7) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "none": torch.empty(3, 0, 2)}
    save_file(tensors, tmp_path / "x.safetensors", {"a": "b"})
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert checkpoint.metadata == {"a": "b"}
    assert checkpoint.keys() == tensors.keys()
    for name, wanted in load_file(tmp_path / "x.safetensors").items():
        assert same_bits(checkpoint[name].materialize(), wanted)
        assert checkpoint[name] is checkpoint[name]
        assert checkpoint.file_of(name) == "x.safetensors"
    assert checkpoint.nbytes == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("source", ["", "model.safetensors.index.json"])
def test_shards_are_opened_in_their_order(tmp_path: Path, source: str) -> None:
    tensors = _sharded(tmp_path)
    checkpoint = open_checkpoint(tmp_path / source)
    assert list(checkpoint) == ["c", "b", "a"]
    assert checkpoint.file_of("a") == _shard(3)
    assert not hf_stream.verify(checkpoint, tensors)


def test_a_directory_without_an_index_is_all_its_files(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    _index(tmp_path).unlink()
    (tmp_path / "._model.safetensors").write_bytes(b"left by a Mac")
    assert not hf_stream.verify(open_checkpoint(tmp_path), tensors)


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    _sharded(tmp_path)
    save_file({"z": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path)) == ["z"]


def test_the_index_of_a_variant(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    variant = _index(tmp_path).rename(tmp_path / "model.safetensors.index.fp16.json")
    assert not hf_stream.verify(open_checkpoint(tmp_path), tensors)
    assert not hf_stream.verify(open_checkpoint(variant), tensors)


def test_shards_in_subfolders(tmp_path: Path) -> None:
    for folder in "xy":
        (tmp_path / folder).mkdir()
        save_file({folder: torch.ones(2)}, tmp_path / folder / "w.safetensors")
    _index(tmp_path).write_text(json.dumps({"weight_map": {name: f"{name}/w.safetensors" for name in "xy"}}))
    assert list(open_checkpoint(tmp_path)) == ["x", "y"]
    files = open_files(tmp_path, [tmp_path / "x/w.safetensors", tmp_path / "y/w.safetensors"])
    assert {name: files.file_of(name) for name in files} == {"x": "x/w.safetensors", "y": "y/w.safetensors"}


def test_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("../blobs") / path.name)
    assert not hf_stream.verify(open_checkpoint(tmp_path / "snapshot"), tensors)


def test_the_index_says_which_of_two_tensors_counts(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    save_file({"a": torch.zeros(4, 3), "b": tensors["b"]}, tmp_path / _shard(2))
    assert not hf_stream.verify(open_checkpoint(tmp_path), tensors)
    _index(tmp_path).unlink()
    with pytest.raises(CheckpointError, match="'a' is in two files"):
        open_checkpoint(tmp_path)


def test_tensors_that_no_index_lists_are_kept_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = _sharded(tmp_path)
    save_file({"extra": torch.ones(1), "b": tensors["b"]}, tmp_path / _shard(2))
    assert "extra" in open_checkpoint(tmp_path)
    assert "does not list 1 tensors of its files, 'extra' for one" in caplog.text


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_shard(tmp_path: Path, with_index: bool, number: int) -> None:
    _sharded(tmp_path)
    (tmp_path / _shard(number)).unlink()
    if not with_index:
        _index(tmp_path).unlink()
    with pytest.raises(CheckpointError, match=r"missing.*the checkpoint is not whole"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_what_its_shard_lacks(tmp_path: Path) -> None:
    _sharded(tmp_path)
    _edit_index(tmp_path, a=_shard(1))
    with pytest.raises(CheckpointError, match=f"says that '{_shard(1)}' has 'a'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("escape", ["../out.safetensors", "/etc/passwd", "x/../../out.safetensors"])
def test_an_index_cannot_point_outside(tmp_path: Path, escape: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "out.safetensors")
    _sharded(tmp_path / "in")
    _edit_index(tmp_path / "in", a=escape)
    with pytest.raises(FormatError, match="inside the directory"):
        open_checkpoint(tmp_path / "in")


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("nowhere", "does not exist"),
        ("empty", "holds no .safetensors file"),
        ("file.txt", "neither a directory nor"),
        ("file.npz", "an archive of numpy, which hf_stream does not read"),
        ("folder.safetensors", "holds no .safetensors file"),
        ("pipe.safetensors", "is not a regular file"),
        ("holds a folder", "is not a regular file"),
        ("holds a pipe", "is not a regular file"),
        ("two", "2 index files"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, source: str, fact: str) -> None:
    for folder in ("empty", "folder.safetensors", "holds a folder/model.safetensors", "holds a pipe", "two"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file.npz").write_bytes(b"")
    (tmp_path / "file.txt").write_bytes(b"")
    for name in ("x", "y"):
        (tmp_path / "two" / f"{name}.safetensors.index.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.safetensors")
    os.mkfifo(tmp_path / "holds a pipe" / "x.safetensors")
    with pytest.raises(CheckpointError, match=fact):
        open_checkpoint(tmp_path / source)


@pytest.mark.parametrize("content", [b"", b"\x00", b"{}", bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}x"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=r"bad\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_dtype_torch_does_not_know_is_an_error_when_asked_for(tmp_path: Path) -> None:
    header = b'{"six":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}    '
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert checkpoint.nbytes == 3
    with pytest.raises(FormatError, match=r"'six' in '.*x.safetensors': dtype F6_E2M3"):
        checkpoint["six"]


def test_what_was_opened_outlives_its_files(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    hf_stream.save_checkpoint({"new": torch.ones(1)}, tmp_path)
    assert not hf_stream.verify(checkpoint, tensors)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_checkpoint_replaced_while_it_is_opened_is_not_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    old = _sharded(tmp_path)
    new = {name: tensor.neg() for name, tensor in old.items()}
    calls = 0
    parse = hf_stream.checkpoint.weight_files.parse_header

    def parse_and_replace(*args):
        nonlocal calls
        if calls == after:
            hf_stream.save_checkpoint(new, tmp_path, max_shard_size=48)
        calls += 1
        return parse(*args)

    monkeypatch.setattr(hf_stream.checkpoint.weight_files, "parse_header", parse_and_replace)
    # What was replaced too early is opened once more.
    assert not hf_stream.verify(open_checkpoint(tmp_path), old if after == 3 else new)


def test_the_files_of_two_checkpoints_are_told_apart_without_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = {name: tensor.neg() for name, tensor in _sharded(tmp_path).items()}
    _index(tmp_path).unlink()
    add = hf_stream.Checkpoint._add

    def add_and_replace(self: hf_stream.Checkpoint, file: str, *args: object) -> None:
        add(self, file, *args)
        if file == _shard(1):
            hf_stream.save_checkpoint(new, tmp_path, max_shard_size=48)

    monkeypatch.setattr(hf_stream.Checkpoint, "_add", add_and_replace)
    with pytest.raises(CheckpointError, match=f"'{_shard(1)}' was replaced while it was in use"):
        open_checkpoint(tmp_path)


def test_an_old_index_does_not_go_with_new_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = {name: tensor.neg() for name, tensor in _sharded(tmp_path).items()}
    read_index = hf_stream.checkpoint.open.read_index

    def read_and_replace(path: Path) -> object:
        index = read_index(path)
        hf_stream.save_checkpoint(new, tmp_path, max_shard_size=48)
        return index

    monkeypatch.setattr(hf_stream.checkpoint.open, "read_index", read_and_replace)
    with pytest.raises(CheckpointError, match=r"index\.json' was replaced while it was being opened"):
        open_checkpoint(tmp_path)


def test_opening_reads_headers_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting_file) -> None:
    hf_stream.save_checkpoint({name: torch.ones(1000) for name in "abc"}, tmp_path, max_shard_size=4000)
    monkeypatch.setattr("hf_stream.checkpoint.weight_files.FileStorage", counting_file)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.storages) == 3
    hf_stream.plan_conversion(checkpoint, dtype=torch.float16).fingerprint()
    for name, storage in checkpoint.storages.items():
        (info,) = checkpoint.headers[name].tensors.values()
        assert not storage.read_counts[info.start :].any()
        assert (storage.read_counts[: info.start] >= 1).all()


@pytest.mark.parametrize("kind", ["safetensors", "shards", "torch", "legacy", "deflated", "olmo"])
def test_a_with_block_closes_the_files(tmp_path: Path, kind: str) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(3)}
    path = tmp_path / ("x.safetensors" if kind in ("safetensors", "olmo") else "x.pt")
    if kind == "shards":
        path = hf_stream.save_checkpoint(tensors, tmp_path / "shards", max_shard_size=20)
    elif kind == "safetensors":
        save_file(tensors, path)
    elif kind == "olmo":
        names = {name: base64.urlsafe_b64encode(pickle.dumps(((name,), False))).decode() for name in tensors}
        save_file({names[name]: tensor for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind != "legacy")
    if kind == "deflated":
        write_records(path, records_of(path), zipfile.ZIP_DEFLATED)
    before = set(os.listdir("/proc/self/fd"))
    with hf_stream.open_checkpoint(path) as checkpoint:
        lazy = checkpoint["a"]
        loaded = lazy.materialize()
        (mapped,) = hf_stream.materialize([checkpoint["b"]], alias=True)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert loaded.equal(tensors["a"])
    assert mapped.equal(tensors["b"])
    assert (list(checkpoint), list(checkpoint["a"].shape)) == (["a", "b"], [6])
    for use in (
        lambda: lazy.materialize(),
        lambda: checkpoint["b"].materialize(),
        lambda: hf_stream.materialize(checkpoint, alias=True),
        lambda: hf_stream.save_checkpoint(checkpoint, tmp_path / "out"),
        lambda: torch.ones(6).copy_(lazy),
    ):
        with pytest.raises(CopyError, match=r"was closed.* inside the with block"):
            use()
    assert not (tmp_path / "out").exists()
    checkpoint.close()


def test_an_error_in_a_with_block_comes_through_and_closes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ZeroDivisionError), hf_stream.open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        1 / 0  # noqa: B018
    with pytest.raises(CopyError, match="was closed"):
        checkpoint["a"].materialize()
