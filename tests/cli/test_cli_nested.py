from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import load, process, run
from nestings import assert_same

import hf_stream

DATA = Path(__file__).parents[1] / "data" / "olmo"
STATE = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 3, "betas": (0.9, 0.999)}


@pytest.fixture
def source(tmp_path):
    torch.save(STATE, tmp_path / "foo.pt")
    return tmp_path / "foo.pt"


def test_the_command_of_olmos_users(source, tmp_path):
    result = run("convert", source, tmp_path / "foo.safetensors")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'foo.safetensors'}\n"
    assert "in 1 file as a nested state in" in result.stderr
    assert_same(hf_stream.load_nested(tmp_path / "foo.safetensors"), STATE)


def test_a_directory_holds_the_tensors_or_with_an_option_all_of_it(source, tmp_path):
    assert run("convert", source, tmp_path / "weights").exit_code == 0
    assert_same(load(tmp_path / "weights"), STATE["model"])
    assert run("convert", source, tmp_path / "state", "--nested").exit_code == 0
    assert_same(hf_stream.load_nested(tmp_path / "state"), STATE)
    assert run("convert", source, tmp_path / "one.safetensors", "--key", "model").exit_code == 0
    assert list(hf_stream.open_checkpoint(tmp_path / "one.safetensors")) == ["w"]
    assert "state.safetensors" in run("plan", source, "--nested").stdout


def test_what_olmo_pickled_is_refused_or_left_out(tmp_path):
    source = DATA / "tensor_in_list" / "state.safetensors"
    result = process("convert", str(source), str(tmp_path / "x.safetensors"))
    assert result.returncode == 2
    assert b"'list': the pickle wants to make" in result.stderr
    assert b"--skip-unreadable" in result.stderr
    result = process("convert", "--skip-unreadable", str(source), str(tmp_path / "x.safetensors"))
    assert result.returncode == 0
    assert b"warning:" in result.stderr
    assert list(hf_stream.open_checkpoint(tmp_path / "x.safetensors")) == ["w"]


@pytest.mark.parametrize("path", ["foo.pt", "olmo.safetensors"])
def test_inspect_shows_all_of_a_nesting(source, tmp_path, path):
    (tmp_path / "olmo.safetensors").write_bytes((DATA / "full" / "state.safetensors").read_bytes())
    text = run("inspect", tmp_path / path).stdout
    name = "model/w" if path == "foo.pt" else "optim/state/0/exp_avg"
    assert name in text
    assert "nested state: dict of" in text
    assert ("  step: 3" if path == "foo.pt" else "    param_groups: list of 2") in text
    assert name not in run("inspect", tmp_path / path, "--key", "model").stdout


def test_inspect_shows_the_file_that_is_named(source, tmp_path):
    hf_stream.convert(source, tmp_path / "foo.safetensors")
    assert "foo.safetensors" not in run("inspect", source).stdout
