"""Python objects in files of torch.save: never made, and in nobody's way where they are not wanted."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import objects
import pytest
import torch
from command_line import run
from nestings import assert_same
from objects import OBJECTS, fairseq, installed, lightning
from safetensors.torch import load_file

import hf_stream
from hf_stream.errors import CheckpointError, FormatError

MODEL = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def save(state: Any, path: Path, zipped: bool = True) -> Any:
    """Write a file, and give what plain torch reads in it where all classes are there."""
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old format wants the source of modules
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        return torch.load(path, weights_only=False)


def assert_holds(folder: Path, wanted: Any) -> None:
    """What the safetensors library reads in a checkpoint, whose order is its own."""
    found = load_file(folder / "model.safetensors")
    assert_same({name: found.pop(name) for name in wanted}, dict(wanted))
    assert not found


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_elsewhere_in_the_file_are_in_nobodys_way(tmp_path, kind, zipped, caplog):
    path = tmp_path / "x.ckpt"
    wanted = save({"made": [OBJECTS[kind]()], "model": MODEL, "step": 3}, path, zipped)
    assert_same(hf_stream.materialize(hf_stream.open_checkpoint(path, key="model")), wanted["model"])
    hf_stream.convert(path, tmp_path / "out", key="model", verify=True)
    assert_holds(tmp_path / "out", MODEL)
    assert caplog.text == ""

    for read in (hf_stream.open_nested, hf_stream.load_nested):
        with pytest.raises(FormatError, match=r"x\.ckpt': 'made/0(/\w+)*' (is|has) .*\. Pass skip_unreadable.*key="):
            read(path)
    found = hf_stream.load_nested(path, skip_unreadable=True)
    assert_same({key: value for key, value in found.items() if key != "made"}, {"model": MODEL, "step": 3})
    assert "1 values are left out" in caplog.text or kind in ("keys", "key of tensors alone")
    assert "'made/0" in caplog.text


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_of_lightning(tmp_path, zipped, caplog):
    path = tmp_path / "last.ckpt"
    wanted = save(lightning(), path, zipped)
    checkpoint = hf_stream.open_checkpoint(path, key="state_dict")
    assert_same(hf_stream.materialize(checkpoint), dict(wanted["state_dict"]))
    state = hf_stream.open_checkpoint(path, key=["optimizer_states", 0, "state", 0])
    assert_same(hf_stream.materialize(state), wanted["optimizer_states"][0]["state"][0])
    assert caplog.text == ""

    found = hf_stream.load_nested(path, skip_unreadable=True)
    assert "8 values are left out" in caplog.text
    (callback,) = found["callbacks"].values()
    assert_same(callback, {"best_model_score": torch.tensor(0.25)})
    assert found["lr_schedulers"] == [{"base_lrs": [0.1], "_last_lr": [None]}]
    for key in ("epoch", "loops", "optimizer_states", "hparams_name"):
        assert_same(found[key], wanted[key])
    assert found.keys() == wanted.keys() - {"hyper_parameters", "datamodule_hparams_type", "started"}
    hf_stream.save_nested(found, tmp_path / "plain.safetensors")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_of_fairseq(tmp_path, zipped):
    path = tmp_path / "checkpoint_best.pt"
    wanted = save(fairseq(), path, zipped)
    assert_same(hf_stream.materialize(hf_stream.open_checkpoint(path, key="model")), wanted["model"])
    with pytest.raises(CheckpointError, match=r"holds 3 dicts or lists of tensors.*'model' \(2 tensors\)"):
        hf_stream.open_checkpoint(path)
    with pytest.raises(FormatError, match=r"'args' is an object made by 'argparse\.Namespace'"):
        hf_stream.open_nested(path)
    found = hf_stream.load_nested(path, skip_unreadable=True)
    assert found.keys() == wanted.keys() - {"args", "cfg", "task_state"}
    assert_same(found["last_optimizer_state"], wanted["last_optimizer_state"])
    assert found["extra_state"]["metrics"]["default"][0][:3] == (0, "loss", None)


def test_the_command_line_goes_the_same_ways(tmp_path):
    path = tmp_path / "last.ckpt"
    wanted = save(lightning(), path)
    assert run("convert", path, tmp_path / "out", "--key", "state_dict", "--quiet").exit_code == 0
    assert_holds(tmp_path / "out", wanted["state_dict"])
    refused = run("convert", path, tmp_path / "all.safetensors", "--quiet")
    assert refused.exit_code != 0
    assert "--skip-unreadable" in refused.stderr
    assert run("convert", path, tmp_path / "all.safetensors", "--skip-unreadable", "--quiet").exit_code == 0
    assert_same(hf_stream.load_nested(tmp_path / "all.safetensors")["state_dict"], wanted["state_dict"])


@pytest.mark.parametrize(
    "kind", [kind for kind in OBJECTS if kind not in ("set of paths", "keys", "key of tensors alone")]
)
def test_objects_among_the_tensors_are_refused_or_left_out(tmp_path, kind, caplog):
    path = tmp_path / "x.pt"
    save({**MODEL, "made": OBJECTS[kind](), "step": 3}, path)
    with pytest.raises(
        FormatError, match=r"x\.pt': 'made' is (an object made by|the function or class) '.*skip_unreadable"
    ):
        hf_stream.open_checkpoint(path)
    with pytest.raises(FormatError, match=r"'made' is "):
        hf_stream.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert_same(hf_stream.materialize(hf_stream.open_checkpoint(path, skip_unreadable=True)), MODEL)
    assert "1 values are left out: 'made' is" in caplog.text
    hf_stream.convert(path, tmp_path / "out", skip_unreadable=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == MODEL.keys()


def test_tensors_that_have_objects_for_names(tmp_path):
    save({"model": {objects.Phase.TRAIN: torch.ones(1), "w": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"the key of a tensor is an object made by '\w+\.Phase'"):
        hf_stream.open_checkpoint(tmp_path / "x.pt")
    assert list(hf_stream.open_checkpoint(tmp_path / "x.pt", skip_unreadable=True)) == ["w"]


@pytest.mark.parametrize(
    ("key", "kind"), [("args", "Namespace"), ("args/weight", "Namespace of tensors"), ("args", "class")]
)
def test_a_key_that_leads_to_an_object_says_so(tmp_path, key, kind):
    save({"args": OBJECTS[kind](), "model": MODEL}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=rf"x\.pt' at the key '{key}' is .*weights_only=False") as error:
        hf_stream.open_checkpoint(tmp_path / "x.pt", key=key)
    # As torch calls it.
    assert isinstance(error.value, pickle.UnpicklingError)


def test_whole_modules_are_named(tmp_path):
    save(objects.Net(), tmp_path / "x.pt")
    for read in (hf_stream.open_checkpoint, hf_stream.open_nested):
        with pytest.raises(FormatError, match=r"x\.pt.* is an object made by '\w+\.Net'.*weights_only=False"):
            read(tmp_path / "x.pt")
    with pytest.raises(FormatError, match="nothing else is in it"):
        hf_stream.open_nested(tmp_path / "x.pt", skip_unreadable=True)
    save({"epoch": 3, "model": objects.Net()}, tmp_path / "y.pt")
    with pytest.raises(
        CheckpointError, match=r"no key at all, but 'model' is an object .*\.Net'.*was to be made of some"
    ):
        hf_stream.open_checkpoint(tmp_path / "y.pt")


def test_tensors_in_an_object_are_told_where_another_dict_is_taken(tmp_path, caplog):
    save({"net": {"inner": objects.Net()}, "ema": MODEL}, tmp_path / "x.pt")
    assert hf_stream.open_checkpoint(tmp_path / "x.pt").keys() == MODEL.keys()
    assert "'net/inner' is an object made by" in caplog.text
    caplog.clear()
    hf_stream.open_checkpoint(tmp_path / "x.pt", key="ema")
    assert caplog.text == ""


class Own(torch.Tensor):
    pass


def test_tensors_of_other_classes_may_lie_elsewhere(tmp_path):
    own = torch.ones(2).as_subclass(Own)
    save(
        {"model": MODEL, "own": [own, torch.nn.Parameter(torch.ones(1)).data, torch.ones(3).to_sparse()]},
        tmp_path / "x.pt",
    )
    assert_same(hf_stream.materialize(hf_stream.open_checkpoint(tmp_path / "x.pt", key="model")), MODEL)
    with pytest.raises(FormatError, match=r"'own/0' is a tensor of the class '.*\.Own'"):
        hf_stream.open_nested(tmp_path / "x.pt")
    found = hf_stream.load_nested(tmp_path / "x.pt", skip_unreadable=True)
    assert_same(found["own"], [None, torch.ones(1), None])


def test_attributes_that_are_objects(tmp_path, caplog):
    noted = torch.nn.Parameter(torch.ones(2))
    noted.phase, noted.step = objects.Phase.TRAIN, 3
    save({"model": {"w": noted}}, tmp_path / "x.pt")
    assert list(hf_stream.open_checkpoint(tmp_path / "x.pt")) == ["w"]
    with pytest.raises(FormatError, match=r"'model/w/\.phase' is an object made by"):
        hf_stream.open_nested(tmp_path / "x.pt")
    found = hf_stream.open_nested(tmp_path / "x.pt", skip_unreadable=True)["model"]["w"]
    assert (found.step, hasattr(found, "phase")) == (3, False)


def test_a_conversion_without_the_objects_stands_for_the_file(tmp_path, caplog):
    save({"args": OBJECTS["Namespace"](), "model": MODEL}, tmp_path / "x.pt")
    hf_stream.convert(tmp_path / "x.pt", tmp_path / "x.safetensors", skip_unreadable=True)
    caplog.set_level("INFO", "hf_stream")
    assert_same(hf_stream.load_nested(tmp_path / "x.pt", skip_unreadable=True), {"model": MODEL})
    assert "is read in the place of 'x.pt'" in caplog.messages[-1]
