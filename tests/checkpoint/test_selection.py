"""Some of a checkpoint's tensors, as huggingface_hub selects files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import hf_stream
from hf_stream import CheckpointError
from hf_stream.checkpoint.selection import select_names

NAMES = ["lm_head.weight", "model.embed.weight", *(f"model.layers.{i}.{n}.weight" for i in range(3) for n in "qk")]
PATTERNS = st.one_of(
    st.sampled_from(["*", "*.weight", "model.layers.[01].*", "*.?.weight", "lm*", "x*"]), st.sampled_from(NAMES)
)
SEVERAL = st.one_of(st.none(), PATTERNS, st.lists(PATTERNS, max_size=3))


@given(SEVERAL, SEVERAL)
def test_the_same_names_as_huggingface_hub_selects(
    allow: str | list[str] | None, ignore: str | list[str] | None
) -> None:
    wanted = list(filter_repo_objects(NAMES, allow_patterns=allow, ignore_patterns=ignore))
    try:
        assert list(select_names(NAMES, allow, ignore, where="here")) == wanted
    except CheckpointError:
        used = [
            *([allow] if isinstance(allow, str) else allow or []),
            *([ignore] if isinstance(ignore, str) else ignore or []),
        ]
        assume("x*" not in used)
        raise


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    save_file({name: torch.full((4,), float(i)) for i, name in enumerate(NAMES)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    return directory


def test_convert_takes_what_is_selected_and_reads_nothing_else(source: Path, tmp_path: Path) -> None:
    options = {"allow_patterns": "model.layers.*", "ignore_patterns": ["*.1.*", "*.k.*"]}
    plan = hf_stream.plan_conversion(source, **options)
    hf_stream.convert(source, tmp_path / "out", **options)

    everything = load_file(source / "model.safetensors")
    wanted = ["model.layers.0.q.weight", "model.layers.2.q.weight"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == wanted
    assert all(torch.equal(found[name], everything[name]) for name in wanted)
    assert sum(plan.nbytes_read().values()) == 2 * 16
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("argument", ["allow_patterns", "ignore_patterns"])
def test_a_pattern_that_matches_nothing_is_refused_before_anything_is_written(
    argument: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"pattern 'model\.layer\.\*' matches none of the 8 tensors, such as 'lm_head"
    ):
        hf_stream.convert(source, tmp_path / "out", **{argument: ["*", "model.layer.*"]})
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_to_write(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensors are left to write"):
        hf_stream.convert(source, tmp_path / "out", ignore_patterns="*")


def test_nestings_have_no_part(tmp_path: Path) -> None:
    torch.save({"a": {"w": torch.ones(2)}, "step": 1}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="'allow_patterns' is for named tensors, 'nested' for all"):
        hf_stream.convert(tmp_path / "x.pt", tmp_path / "out", nested=True, allow_patterns="*w")
    hf_stream.convert(tmp_path / "x.pt", tmp_path / "x.safetensors", allow_patterns="w")
    assert list(load_file(tmp_path / "x.safetensors")) == ["w"]
