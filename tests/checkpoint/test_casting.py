from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import run
from safetensors.torch import load_file, save_file
from samples import same_bits

from hf_stream import convert, plan_conversion
from hf_stream.errors import ArgumentError
from hf_stream.formats.dtypes import CAST_TARGETS, TORCH_DTYPES

LOSSY = [
    *(dtype for dtype in TORCH_DTYPES.values() if dtype not in CAST_TARGETS),
    torch.complex128,
    torch.complex32,
    torch.quint8,
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    weights = {"w": torch.tensor([300.0, -0.4, 3e-6]), "ids": torch.arange(3)}
    save_file(weights, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


@pytest.mark.parametrize("dtype", LOSSY)
def test_what_holds_no_weights_is_refused(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    for call in (convert, plan_conversion):
        with pytest.raises(ArgumentError, match=f"dtype= is {dtype}, and .* such as torch.bfloat16"):
            call(source, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", LOSSY[:-3])
def test_the_command_line_refuses_the_same(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    word = str(dtype).removeprefix("torch.")
    result = run("convert", source, tmp_path / "out", "--dtype", word)
    assert result.exit_code == 2
    assert f"'{word}' is not a floating-point type" in result.stderr


@pytest.mark.parametrize("dtype", CAST_TARGETS)
def test_all_others_are_cast_as_torch_does(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    convert(source, tmp_path / "out.safetensors", dtype=dtype)
    before, after = load_file(source), load_file(tmp_path / "out.safetensors")
    assert same_bits(after["w"], before["w"].to(dtype))
    assert same_bits(after["ids"], before["ids"])
