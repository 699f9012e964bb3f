"""A safetensors file beside a file of torch.save is read in its place, if it is a conversion of it."""

from __future__ import annotations

import logging
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from nestings import assert_same
from safetensors import safe_open
from safetensors.torch import save_file

import hf_stream
from hf_stream import CheckpointError, FormatError
from hf_stream.layouts import Transpose

FLAT = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
# What is read tells its source: the conversions hold other numbers.
OTHER = {name: tensor + 1 for name, tensor in FLAT.items()}
NESTED = {"model": FLAT, "step": 3, "betas": (0.9, float("nan")), "empty": {}, "groups": [{"lr": 0.1}]}


@pytest.fixture(autouse=True)
def _every_line_is_logged(caplog):
    caplog.set_level(logging.INFO, "hf_stream")


def torch_file(folder: Path, state: Any = FLAT, age: float = 10, **options: Any) -> Path:
    """foo.pt, written some seconds ago."""
    path = folder / "foo.pt"
    torch.save(state, path, **options)
    made = path.stat().st_mtime - age
    os.utime(path, (made, made))
    return path


def beside(folder: Path, state: Any = OTHER) -> Path:
    return hf_stream.save_nested(state, folder / "foo.safetensors")


def loaded(path: Path, **options: Any) -> Any:
    return hf_stream.materialize(hf_stream.open_checkpoint(path, **options))


def test_a_flat_conversion_is_read_in_the_place_of_the_file(tmp_path, caplog):
    path = torch_file(tmp_path)
    save_file(OTHER, tmp_path / "foo.safetensors")
    assert_same(dict(sorted(loaded(path).items())), OTHER)
    assert_same(dict(sorted(hf_stream.load_nested(path).items())), OTHER)
    message = f"'{tmp_path / 'foo.safetensors'}' is read in the place of 'foo.pt'"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", message)] * 2

    caplog.clear()
    assert_same(loaded(path, prefer_safetensors=False), FLAT)
    assert_same(hf_stream.load_nested(path, prefer_safetensors=False), FLAT)
    # The checksums that are wanted are those of the file that was named.
    assert_same(loaded(path, verify=True), FLAT)
    assert caplog.records == []


@pytest.mark.parametrize("name", ["foo.bin", "foo.pth", "foo.ckpt"])
def test_other_suffixes_of_torch(tmp_path, name):
    torch_file(tmp_path).rename(tmp_path / name)
    save_file(OTHER, tmp_path / "foo.safetensors")
    assert_same(dict(sorted(loaded(tmp_path / name).items())), OTHER)


def test_a_nested_conversion_is_read_in_the_place_of_the_file(tmp_path):
    path = torch_file(tmp_path, NESTED)
    other = {**NESTED, "model": OTHER}
    beside(tmp_path, other)
    assert_same(hf_stream.load_nested(path), other)
    assert_same(hf_stream.materialize(hf_stream.open_nested(path)["model"]), OTHER)
    # As the file itself would be opened, not by paths.
    assert_same(loaded(path), OTHER)
    assert_same(loaded(path, key="model"), OTHER)
    with pytest.raises(CheckpointError, match="nothing at the key 'ema'"):
        loaded(path, key="ema")


@pytest.mark.parametrize("age", [-10, 0])
def test_an_older_file_is_not_read_and_one_of_the_same_time_is(tmp_path, age, caplog):
    save_file(OTHER, tmp_path / "foo.safetensors")
    path = torch_file(tmp_path)
    made = (tmp_path / "foo.safetensors").stat().st_mtime - age
    os.utime(path, (made, made))
    os.utime(tmp_path / "foo.safetensors", (made + age, made + age))
    wanted = FLAT if age else OTHER
    assert_same(dict(sorted(loaded(path).items())), wanted)
    assert_same(dict(sorted(hf_stream.load_nested(path).items())), wanted)
    assert ("is older than 'foo.pt'" in caplog.text) == bool(age)


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        ({**OTHER, "b": torch.ones(3, dtype=torch.bfloat16)}, "'b' is another one"),
        ({**OTHER, "b": torch.ones(2)}, "'b' is another one"),
        ({"b": OTHER["b"]}, "'a.weight' is missing"),
        ({**OTHER, "c": torch.ones(1)}, "'c' is new"),
        ({"model": OTHER}, "'model/a.weight' is new|'a.weight' is missing|None"),
    ],
)
def test_what_is_no_conversion_is_not_read(tmp_path, other, fact, caplog):
    path = torch_file(tmp_path)
    beside(tmp_path, other)
    if "model" not in other:  # else it is the one dict of tensors
        assert_same(loaded(path), FLAT)
        assert caplog.records[-1].levelname == "WARNING"
    assert_same(hf_stream.load_nested(path), FLAT)
    (warning,) = caplog.messages[-1:]
    assert "is not read in the place of 'foo.pt', as it holds something else" in warning
    assert any(part in warning for part in fact.split("|"))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"step": 4}, "'step' is another one"),
        ({"step": 3.0}, "'step' is another one"),
        ({"step": torch.tensor(3)}, "'step' is another one"),
        ({"betas": (0.9, 0.99)}, "'betas/1' is another one"),
        ({"groups": []}, "'groups/0/lr' is missing"),
        ({"groups": ({"lr": 0.1},)}, "'groups' is another one"),
        ({"groups": {0: {"lr": 0.1}}}, "'groups' is another one"),
        ({"empty": []}, "'empty' is another one"),
        ({"more": 1}, "'more' is new"),
        ({"more": {"inside": ()}}, "'more/inside' is new"),
    ],
)
def test_other_values_make_it_no_conversion(tmp_path, change, fact, caplog):
    path = torch_file(tmp_path, NESTED)
    beside(tmp_path, {**NESTED, **change})
    assert_same(hf_stream.load_nested(path), NESTED)
    assert fact in caplog.messages[-1]


def test_the_kinds_of_dicts_and_their_order_do_not_matter(tmp_path):
    path = torch_file(tmp_path, OrderedDict(model=OrderedDict(FLAT), none=OrderedDict()))
    other = {"none": {}, "model": dict(reversed(OTHER.items()))}
    beside(tmp_path, other)
    assert_same(hf_stream.load_nested(path), other)


def test_a_damaged_file_beside_is_not_read(tmp_path, caplog):
    path = torch_file(tmp_path)
    (tmp_path / "foo.safetensors").write_bytes(b"cut off")
    assert_same(loaded(path), FLAT)
    assert_same(hf_stream.load_nested(path), FLAT)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    path.unlink()
    for function in (hf_stream.open_checkpoint, hf_stream.open_nested):
        with pytest.raises(FormatError, match="header"):
            function(path)


def test_a_file_that_cannot_be_opened_itself_has_a_way_round(tmp_path, caplog):
    class Code:
        def __reduce__(self):
            return print, ("run",)

    path = torch_file(tmp_path, {**FLAT, "code": Code()})
    with pytest.raises(FormatError, match=r"'code' is an object made by 'builtins\.print'"):
        loaded(path)
    save_file(OTHER, tmp_path / "foo.safetensors")
    assert_same(dict(sorted(loaded(path).items())), OTHER)
    assert "cannot be read itself" in caplog.messages[0]


def test_a_file_of_an_old_format_is_compared_as_well(tmp_path, caplog):
    path = torch_file(tmp_path, _use_new_zipfile_serialization=False)
    save_file(OTHER, tmp_path / "foo.safetensors")
    assert_same(dict(sorted(loaded(path).items())), OTHER)
    assert_same(dict(sorted(hf_stream.load_nested(path).items())), OTHER)
    save_file({**OTHER, "c": torch.ones(1)}, tmp_path / "foo.safetensors")
    assert_same(loaded(path), FLAT)
    assert_same(hf_stream.load_nested(path), FLAT)
    assert "'c' is new" in caplog.text


def test_the_file_itself_need_not_be_there(tmp_path):
    save_file(OTHER, tmp_path / "foo.safetensors")
    assert_same(dict(sorted(loaded(tmp_path / "foo.pt").items())), OTHER)
    assert_same(dict(sorted(hf_stream.load_nested(tmp_path / "foo.pt").items())), OTHER)
    with pytest.raises(CheckpointError, match="does not exist"):
        hf_stream.open_checkpoint(tmp_path / "foo.pt", prefer_safetensors=False)
    with pytest.raises(CheckpointError, match="does not exist"):
        hf_stream.open_nested(tmp_path / "bar.pt")


def test_what_is_named_is_what_is_converted_and_verified(tmp_path):
    path = torch_file(tmp_path)
    save_file(OTHER, tmp_path / "foo.safetensors")
    assert hf_stream.verify(path, tmp_path / "foo.safetensors").values.keys() == FLAT.keys()
    hf_stream.convert(path, tmp_path / "directory")
    assert_same(loaded(tmp_path / "directory"), FLAT)
    hf_stream.convert(path, tmp_path / "foo.safetensors")
    assert not hf_stream.verify(path, tmp_path / "foo.safetensors")
    assert_same(dict(sorted(loaded(tmp_path / "foo.safetensors").items())), FLAT)


def test_a_flat_file_of_one_dict_does_not_stand_for_another(tmp_path, caplog):
    path = torch_file(tmp_path, {"model": FLAT, "ema": {name: tensor + 2 for name, tensor in FLAT.items()}})
    save_file(OTHER, tmp_path / "foo.safetensors")
    assert_same(loaded(path, key="model"), FLAT)
    assert "no keys to follow" in caplog.text


def converted(path: Path, state: Any, **options: Any) -> Path:
    """A conversion of foo.pt, and after it another foo.pt of the same time."""
    hf_stream.convert(path, path.with_suffix(".safetensors"), **options)
    status = path.stat()
    torch.save(state, path, _use_new_zipfile_serialization=zipfile.is_zipfile(path))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return path


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("options", [{}, {"key": ""}])
@pytest.mark.filterwarnings("ignore")
def test_a_conversion_of_another_file_is_not_read(tmp_path, legacy, options, caplog):
    path = torch_file(tmp_path, FLAT, _use_new_zipfile_serialization=not legacy)
    converted(path, OTHER, **options)
    assert_same(dict(sorted(loaded(path).items())), OTHER)
    assert_same(dict(sorted(hf_stream.load_nested(path).items())), OTHER)
    assert "was made of another 'foo.pt', or changed on the way, and is not read in its place" in caplog.text


def test_a_conversion_through_a_layout_is_not_read(tmp_path):
    """Names, types and shapes can be the same, and values others."""
    path = torch_file(tmp_path, {"w": torch.arange(9.0).reshape(3, 3)})
    hf_stream.convert(path, tmp_path / "foo.safetensors", layout=hf_stream.Layout([Transpose("w")]))
    assert loaded(path)["w"].flatten().tolist() == list(range(9))
    assert hf_stream.load_nested(path)["w"].flatten().tolist() == list(range(9))


def test_a_nested_conversion_of_another_file_is_not_read(tmp_path):
    other = {**NESTED, "model": OTHER}
    path = converted(torch_file(tmp_path, NESTED), other)
    assert_same(hf_stream.load_nested(path), other)
    assert_same(loaded(path), OTHER)


@pytest.mark.parametrize("state", [FLAT, NESTED])
def test_a_conversion_is_read_however_old_it_seems(tmp_path, state, caplog):
    path = torch_file(tmp_path, state)
    other = hf_stream.convert(path, tmp_path / "foo.safetensors")
    os.utime(other, (0, 0))
    assert_same(dict(sorted(loaded(path).items())), FLAT)
    assert "foo.safetensors' is read in the place of 'foo.pt'" in caplog.text


def test_without_checksums_the_time_decides(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = torch_file(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    other = hf_stream.convert(path, tmp_path / "foo.safetensors")
    with safe_open(other, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_is_made_of_a_conversion_does_not_say_what_that_was_made_of(tmp_path):
    hf_stream.convert(torch_file(tmp_path), tmp_path / "foo.safetensors")
    hf_stream.convert(tmp_path / "foo.safetensors", tmp_path / "bar.safetensors")
    with safe_open(tmp_path / "bar.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
