"""Files of torch.save and of OLMo converted as a whole."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from nestings import assert_same
from safetensors import safe_open
from safetensors.torch import load_file

import hf_stream
from hf_stream import CheckpointError, CopyError, FormatError, LazyTensor
from hf_stream.storage.file import FileStorage


def adamw() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return optimizer.state_dict()


def written(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def origin(path: Path) -> str:
    """What a file made of this one notes of it."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    # Of each record: name, first byte, bytes in the file and in memory, CRC-32, whether it is compressed.
    data = path.read_bytes()
    facts = []
    for record in records:
        names, extras = struct.unpack_from("<2H", data, record.header_offset + 26)
        start = record.header_offset + 30 + names + extras
        facts.append([record.filename, start, record.compress_size, record.file_size, record.CRC, False])
    return json.dumps({"nbytes": len(data), "sha256": hashlib.sha256(json.dumps(facts).encode()).hexdigest()})


def open_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118 - it is no dict
        return {"metadata": file.metadata(), **tensors}


def test_a_nested_file_becomes_what_save_nested_writes(tmp_path):
    state = adamw()
    source = written(tmp_path / "optim.pt", state)
    assert hf_stream.convert(source, tmp_path / "optim.safetensors", verify=True) == tmp_path / "optim.safetensors"
    hf_stream.save_nested(state, tmp_path / "wanted.safetensors")
    made, wanted = (open_safetensors(tmp_path / name) for name in ("optim.safetensors", "wanted.safetensors"))
    assert made.pop("metadata").items() - wanted.pop("metadata").items() == {("hf_stream.origin", origin(source))}
    assert made == wanted
    assert_same(hf_stream.load_nested(tmp_path / "optim.safetensors"), state)


def test_a_flat_file_becomes_an_ordinary_one(tmp_path):
    state = torch.nn.BatchNorm1d(3).state_dict()  # an OrderedDict with metadata of its own
    source = written(tmp_path / "model.pt", state)
    hf_stream.convert(source, tmp_path / "model.safetensors", verify=True)
    assert_same(dict(sorted(load_file(tmp_path / "model.safetensors").items())), dict(sorted(state.items())))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "hf_stream.origin": origin(source)}


def test_memory_that_is_shared_is_written_once_and_shared_again(tmp_path):
    weight = torch.randn(100, 10)
    state = {"model": {"wte": weight, "head": weight, "rows": weight[3:7], "p": torch.nn.Parameter(weight)}, "step": 1}
    source = written(tmp_path / "x.pt", state)
    hf_stream.convert(source, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size < 2 * weight.nbytes
    for path in (tmp_path / "x.safetensors", source):
        for prefer in (True, False):
            loaded = hf_stream.load_nested(path, prefer_safetensors=prefer)
            assert_same(loaded, state)
            storages = {tensor.untyped_storage().data_ptr() for tensor in loaded["model"].values()}
            assert len(storages) == 1


def test_named_tensors_go_alone_with_a_key_a_type_or_a_layout(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "epoch": 3}
    source = written(tmp_path / "x.pt", state)
    one = torch.ones(2)
    hf_stream.convert(source, tmp_path / "key.safetensors", key="model")
    assert_same(load_file(tmp_path / "key.safetensors"), {"w": one})
    hf_stream.convert(source, tmp_path / "dtype.safetensors", dtype=torch.float16)
    assert_same(load_file(tmp_path / "dtype.safetensors"), {"w": one.half()})
    rename = hf_stream.Layout([hf_stream.layouts.Rename("w", "v")])
    hf_stream.convert(source, tmp_path / "layout.safetensors", layout=rename)
    assert_same(load_file(tmp_path / "layout.safetensors"), {"v": one})
    hf_stream.convert(source, tmp_path / "directory")
    assert_same(load_file(tmp_path / "directory" / "model.safetensors"), {"w": one})
    hf_stream.convert(source, tmp_path / "all.safetensors")
    assert_same(hf_stream.load_nested(tmp_path / "all.safetensors"), state)


def test_a_directory_for_all_of_it_when_asked(tmp_path):
    state = adamw()
    source = written(tmp_path / "optim.pt", state)
    with pytest.raises(CheckpointError, match=r"holds 4 dicts.*--nested"):
        hf_stream.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    hf_stream.convert(source, tmp_path / "out", nested=True, max_shard_size=100, verify=True)
    assert len(list((tmp_path / "out").glob("state-*.safetensors"))) > 1
    assert_same(hf_stream.load_nested(tmp_path / "out"), state)
    # In shards or not, what was there before goes.
    hf_stream.convert(source, tmp_path / "out", nested=True)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize(
    "option", [{"key": "model"}, {"dtype": torch.float16}, {"layout": dict}, {"format": "safetensors"}]
)
def test_what_is_for_named_tensors_does_not_go_with_nested(tmp_path, option):
    source = written(tmp_path / "x.pt", {"model": {"w": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=f"'{next(iter(option))}' is for named tensors"):
        hf_stream.convert(source, tmp_path / "out", nested=True, **option)


def test_a_key_is_for_what_is_not_open_yet(tmp_path):
    checkpoint = hf_stream.open_checkpoint(written(tmp_path / "x.pt", {"model": {"w": torch.ones(2)}}))
    with pytest.raises(CheckpointError, match="is open already"):
        hf_stream.convert(checkpoint, tmp_path / "out", key="model")
    hf_stream.convert(checkpoint, tmp_path / "one.safetensors")
    assert list(load_file(tmp_path / "one.safetensors")) == ["w"]


def test_a_state_without_tensors(tmp_path):
    state = {"step": 3, "name": "x", "rng": (3, (1, 2), None)}
    hf_stream.convert(written(tmp_path / "x.pt", state), tmp_path / "x.safetensors", verify=True)
    assert_same(hf_stream.load_nested(tmp_path / "x.safetensors"), state)


def test_what_no_nested_state_holds_is_named(tmp_path):
    source = written(tmp_path / "x.pt", {"model": {"w": torch.ones(2)}, "seen": {1, 2}})
    with pytest.raises(FormatError, match=r"x\.pt': 'seen' is a builtins.set.*Or convert one dict of its tensors"):
        hf_stream.convert(source, tmp_path / "x.safetensors")
    hf_stream.convert(source, tmp_path / "x.safetensors", key="model")
    assert_same(load_file(tmp_path / "x.safetensors"), {"w": torch.ones(2)})


def test_the_source_is_not_replaced(tmp_path):
    hf_stream.save_nested({"a": [torch.ones(1)]}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is where the source is"):
        hf_stream.convert(tmp_path / "x.safetensors", tmp_path / "x.safetensors")


def test_a_failed_conversion_leaves_what_was_there(tmp_path, monkeypatch):
    source = written(tmp_path / "optim.pt", {"a": [torch.ones(1000)], "b": 1})
    target = hf_stream.save_nested({"old": [1]}, tmp_path / "optim.safetensors")

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(FileStorage, "copy_to", fail)
    with pytest.raises(CopyError):
        hf_stream.convert(source, target)
    monkeypatch.undo()
    assert hf_stream.load_nested(target) == {"old": [1]}
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["optim.pt", "optim.safetensors"]


def test_the_plan_says_what_is_read_and_written(tmp_path):
    source = written(tmp_path / "optim.pt", adamw())
    plan = hf_stream.plan_conversion(source, tmp_path / "optim.safetensors")
    assert plan.nested
    assert "state/0/exp_avg" in plan.tensors
    assert {type(tensor) for tensor in plan.tensors.values()} == {LazyTensor}
    assert plan.nbytes_read() == {str(source): sum(tensor.nbytes for tensor in plan.tensors.values())}


def test_olmos_old_directories_hold_their_model_in_a_pt_file(tmp_path):
    weights = {"transformer.wte.weight": torch.ones(3, 2)}
    step = tmp_path / "step1000-unsharded"
    step.mkdir()
    written(step / "model.pt", OrderedDict(weights))
    written(step / "optim.pt", adamw())
    (step / "config.yaml").write_text("model: {}")
    assert_same(hf_stream.materialize(hf_stream.open_checkpoint(step)), weights)
    hf_stream.convert(step, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), weights)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.yaml", "model.safetensors"]


def test_a_flat_dict_with_a_name_that_no_file_can_have_is_a_nested_state(tmp_path):
    state = {"w": torch.arange(2.0), "\ud800": torch.ones(3)}
    torch.save(state, tmp_path / "x.pt")
    hf_stream.convert(tmp_path / "x.pt", tmp_path / "x.safetensors")
    loaded = hf_stream.load_nested(tmp_path / "x.safetensors")
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
