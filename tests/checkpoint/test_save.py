from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from samples import DTYPES, files_of, named_tensors, random_bits, same_bits
from torch.testing._internal.two_tensor import TwoTensor

import hf_stream
from hf_stream.checkpoint.files import CheckpointFiles
from hf_stream.errors import CheckpointError, CopyError, FormatError


@settings(max_examples=60, deadline=None)
@given(tensors=named_tensors(min_side=1, min_size=1), limit=st.integers(1, 300))
def test_files_are_those_of_huggingface_hub(tmp_path_factory: pytest.TempPathFactory, tensors, limit: int) -> None:
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    huggingface_hub.save_torch_state_dict(tensors, theirs, max_shard_size=limit)
    hf_stream.save_checkpoint(tensors, ours, max_shard_size=limit)
    got, wanted = files_of(ours), files_of(theirs)
    index = "model.safetensors.index.json"
    assert json.loads(got.pop(index, b"0")) == json.loads(wanted.pop(index, b"0"))
    assert got == wanted


@settings(max_examples=100, deadline=None)
@given(tensors=named_tensors())
def test_a_single_file_is_that_of_safetensors(tmp_path_factory: pytest.TempPathFactory, tensors) -> None:
    directory = tmp_path_factory.mktemp("out") / "new"
    hf_stream.save_checkpoint(tensors, directory)
    plain = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    assert files_of(directory) == {"model.safetensors": plain}
    assert not hf_stream.verify(tensors, directory)


def test_non_contiguous_expanded_and_tied_tensors_are_written_as_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "t": base.T,
        "step": base[:, ::2],
        "tied": base,
        "again": base,
        "one": base[0, 0].expand(3, 2),
        "inner": base[1:3],
    }
    hf_stream.save_checkpoint(tensors, tmp_path / "out")
    loaded = load_file(tmp_path / "out/model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_parameters_conjugates_and_lazies_are_saved_by_value(tmp_path: Path) -> None:
    z = torch.randn(3, 2, dtype=torch.complex64)
    parameter = torch.nn.Parameter(torch.randn(4))
    lazy = hf_stream.LazyTensor.from_tensor(parameter) * 2
    hf_stream.save_checkpoint({"conj": z.conj(), "p": parameter, "lazy": lazy}, tmp_path / "out")
    loaded = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(loaded["conj"], z.conj().resolve_conj())
    assert torch.equal(loaded["p"], parameter.detach())
    assert torch.equal(loaded["lazy"], parameter.detach() * 2)


def test_no_tensors_make_a_file_without_tensors(tmp_path: Path) -> None:
    hf_stream.save_checkpoint({}, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors") == {}
    assert len(hf_stream.open_checkpoint(tmp_path / "out")) == 0


def test_metadata_goes_into_every_shard(tmp_path: Path) -> None:
    hf_stream.save_checkpoint(
        {"a": torch.ones(4), "b": torch.ones(4)}, tmp_path, max_shard_size=16, metadata={"run": "7"}
    )
    for shard in hf_stream.open_checkpoint(tmp_path).headers.values():
        assert shard.metadata == {"format": "pt", "run": "7"}


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o000])
def test_new_files_have_the_mode_that_the_umask_says(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        hf_stream.save_checkpoint({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "out", max_shard_size=16)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~mask}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~mask


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    hf_stream.save_checkpoint({"a": torch.ones(4)}, tmp_path)
    (tmp_path / "model.safetensors").chmod(0o604)
    hf_stream.save_checkpoint({"a": torch.zeros(4)}, tmp_path)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o604
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.zeros(4))


def test_stale_shards_and_index_go_and_other_files_stay(tmp_path: Path) -> None:
    hf_stream.save_checkpoint({name: torch.ones(4) for name in "abc"}, tmp_path, max_shard_size=16)
    others = ("config.json", "model.safetensors.backup", "adapter_model.safetensors", "pytorch_model.bin")
    for name in others:
        (tmp_path / name).write_bytes(b"kept")
    hf_stream.save_checkpoint({"a": torch.ones(4)}, tmp_path)
    assert set(files_of(tmp_path)) == {"model.safetensors", *others}
    hf_stream.save_checkpoint({name: torch.ones(4) for name in "ab"}, tmp_path, max_shard_size=16)
    shards = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert set(files_of(tmp_path)) == {"model.safetensors.index.json", *shards, *others}


@pytest.mark.parametrize("limit", [1, 100, 10**6])
def test_lazies_may_be_saved_over_the_very_files_they_read(tmp_path: Path, limit: int) -> None:
    tensors = {f"t{n}": random_bits((5, n), torch.float32, n) for n in range(8)}
    hf_stream.save_checkpoint(tensors, tmp_path, max_shard_size=100)
    checkpoint = hf_stream.open_checkpoint(tmp_path)
    swapped = {f"t{n}": checkpoint[f"t{7 - n}"].T for n in range(8)}
    hf_stream.save_checkpoint(swapped, tmp_path, max_shard_size=limit)
    assert not hf_stream.verify({f"t{n}": tensors[f"t{7 - n}"].T for n in range(8)}, tmp_path)
    assert not hf_stream.verify(tensors, checkpoint)


def test_tensors_that_map_the_replaced_file_keep_their_values(tmp_path: Path) -> None:
    save_file({"a": torch.arange(5000.0)}, tmp_path / "model.safetensors")
    mapped = load_file(tmp_path / "model.safetensors")
    hf_stream.save_checkpoint({"a": mapped["a"].flip(0)}, tmp_path)
    assert torch.equal(mapped["a"], torch.arange(5000.0))


@pytest.mark.parametrize("spelling", ["new/", "./new", "link", "deep/er/new"])
def test_however_the_destination_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("pointed/at")
    hf_stream.save_checkpoint({"a": torch.ones(4)}, spelling)
    assert list(hf_stream.open_checkpoint(spelling)) == ["a"]
    assert not list(tmp_path.rglob(".*"))
    hf_stream.save_checkpoint({"b": torch.ones(4)}, spelling)
    assert list(hf_stream.open_checkpoint(spelling)) == ["b"]


def test_saving_into_an_empty_directory(tmp_path: Path) -> None:
    hf_stream.save_checkpoint({"a": torch.ones(4)}, tmp_path)
    assert set(files_of(tmp_path)) == {"model.safetensors"}


def test_a_symlinked_shard_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    save_file({"a": torch.ones(4)}, blob)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model.safetensors").symlink_to(blob)
    before = blob.read_bytes()
    hf_stream.save_checkpoint({"a": torch.zeros(4)}, tmp_path / "snapshot")
    assert blob.read_bytes() == before
    assert not (tmp_path / "snapshot/model.safetensors").is_symlink()


def _broken(tmp_path: Path) -> hf_stream.LazyTensor:
    """A tensor whose file loses its bytes after it was opened."""
    save_file({"a": torch.ones(1000)}, tmp_path / "source.safetensors")
    lazy = hf_stream.open_checkpoint(tmp_path / "source.safetensors")["a"]
    os.truncate(tmp_path / "source.safetensors", 200)
    return lazy


@pytest.mark.parametrize("exists", [False, True])
def test_after_an_error_the_destination_is_as_it_was(tmp_path: Path, exists: bool) -> None:
    lazy = _broken(tmp_path)
    out = tmp_path / "deep" / "out"
    if exists:
        hf_stream.save_checkpoint({"old": torch.ones(3)}, out)
    before = files_of(tmp_path)
    # Where the file was to be, and not where it was growing.
    with pytest.raises(CopyError, match=rf"'a': .* to {out}/model-00001-of-00002\.safetensors \(at byte"):
        hf_stream.save_checkpoint({"a": lazy, "b": torch.ones(5)}, out, max_shard_size=100)
    assert files_of(tmp_path) == before
    assert (tmp_path / "deep").exists() == exists


class _Interrupt:
    def update(self, n: int) -> None:
        raise KeyboardInterrupt


def test_after_ctrl_c_the_destination_is_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        hf_stream.save_checkpoint({"a": torch.ones(3)}, tmp_path / "out", progress=_Interrupt())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensor", "fact"),
    [
        (torch.empty(3, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (TwoTensor(torch.ones(3), torch.ones(3)), "TwoTensor, whose data is in other tensors"),
    ],
)
def test_a_tensor_without_bytes_is_refused_by_name(tmp_path: Path, tensor: torch.Tensor, fact: str) -> None:
    with pytest.raises(CheckpointError, match=f"'x'.*{fact}"):
        hf_stream.save_checkpoint({"ok": torch.ones(2), "x": tensor}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_the_format_cannot_hold_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'z'"):
        hf_stream.save_checkpoint({"z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_place_to_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is a file"):
        hf_stream.save_checkpoint({}, tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        hf_stream.save_checkpoint({}, tmp_path / "file" / "under")


def test_a_directory_with_the_name_of_a_shard_is_seen_before_anything_is_removed(tmp_path: Path) -> None:
    hf_stream.save_checkpoint({name: torch.ones(4) for name in "ab"}, tmp_path, max_shard_size=16)
    (tmp_path / "model.safetensors").mkdir()
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match="is a directory where a file is to be"):
        hf_stream.save_checkpoint({"a": torch.ones(4)}, tmp_path)
    assert files_of(tmp_path) == before


def test_every_dtype_survives(tmp_path: Path) -> None:
    tensors = {str(dtype): random_bits((3, 4), dtype, 1) for dtype in DTYPES}
    hf_stream.save_checkpoint(tensors, tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_groups_sizes_and_names_of_files_are_the_callers(tmp_path: Path) -> None:
    specs = {name: torch.ones(4) for name in "abcd"}
    files = CheckpointFiles.plan(
        specs,
        max_shard_size=32,
        pattern="x{{y}}{suffix}.safetensors",
        index="the.index.json",
        index_metadata={"total_parameters": 12},
        groups={"a": 1, "d": 1},
        sizes={"b": 20},
    )
    assert [sorted(shard.header.tensors) for shard in files.shards] == [["a", "d"], ["b"], ["c"]]
    assert files.entry == "the.index.json"
    assert json.loads(files.small["the.index.json"])["metadata"] == {"total_parameters": 12, "total_size": 52}
    for name in ("x{y}.safetensors", "x{y}-00001-of-00002.safetensors", "the.index.json"):
        assert files.family.fullmatch(name)
    assert not files.family.fullmatch("x{y}zsafetensors")


def test_a_path_of_a_file_is_one_file_beside_which_all_stays(tmp_path: Path) -> None:
    hf_stream.save_checkpoint({"w": torch.zeros(1)}, tmp_path)
    hf_stream.save_checkpoint({f"w{n}": torch.zeros(100) for n in range(3)}, tmp_path / "other", max_shard_size=500)
    before = files_of(tmp_path)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    file = tmp_path / "adapter.v1.safetensors"
    # The safetensors library writes several entries of metadata in any order.
    assert hf_stream.save_checkpoint(tensors, file) == file
    assert files_of(tmp_path) == {**before, file.name: save(tensors, {"format": "pt"})}
    # Over itself, from what it holds.
    hf_stream.save_checkpoint({"c": hf_stream.open_checkpoint(file)["a"].T}, str(file))
    assert load_file(file)["c"].equal(tensors["a"].T)
    assert files_of(tmp_path).keys() == before.keys() | {file.name}
    with hf_stream.CheckpointWriter(tmp_path / "new" / "x.safetensors", tensors) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    assert files_of(tmp_path / "new") == {"x.safetensors": save(tensors, {"format": "pt"})}


def test_one_file_has_no_shards_and_takes_no_directorys_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'x\.safetensors' is to be one file.*max_shard_size"):
        hf_stream.save_checkpoint({"a": torch.ones(1)}, tmp_path / "x.safetensors", max_shard_size="1GB")
    (tmp_path / "x.safetensors").mkdir()
    (tmp_path / "x.safetensors" / "file").touch()
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        hf_stream.save_checkpoint({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    assert files_of(tmp_path) == {"x.safetensors/file": b""}
