"""Quantized checkpoints are cast by nobody, and no layout parts their weights from their scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from safetensors.torch import load_file, save_file
from samples import same_bits

import hf_stream
from hf_stream.errors import CheckpointError, LayoutError
from hf_stream.layouts import (
    Apply,
    Cast,
    Concat,
    Drop,
    Layout,
    Rename,
    Transpose,
    dequantize_fp8_blocks,
    packed_gate_up,
    packed_qkv,
    stacked_experts,
)

FP8, INT8, UINT8 = torch.float8_e4m3fn, torch.int8, torch.uint8
MODULES = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"] + ["model.layers.0.mlp.gate_proj"]
MODULES += ["model.layers.0.mlp.up_proj"]


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, dtype=UINT8).to(dtype)


# What each method writes for a linear layer of [8, 8] called "x": torchao's and the FP8 ones are those of transformers,
# the others those of packages that need a GPU.
METHODS: dict[str, dict[str, torch.Tensor]] = {
    "fp8": {"x.weight": _of(FP8, 8, 8), "x.weight_scale_inv": torch.rand(1, 1)},
    "compressed-tensors": {"x.weight": _of(FP8, 8, 8), "x.weight_scale": torch.rand(8, 1)},
    "bitsandbytes 4": {
        "x.weight": _of(UINT8, 32, 1),
        "x.weight.absmax": torch.rand(1),
        "x.weight.quant_map": torch.rand(16),
        "x.weight.quant_state.bitsandbytes__nf4": _of(UINT8, 90),
    },
    "bitsandbytes 8": {"x.weight": _of(INT8, 8, 8), "x.SCB": torch.rand(8), "x.weight_format": _of(UINT8, 1)[0]},
    "gptq": {
        "x.qweight": _of(torch.int32, 1, 8),
        "x.qzeros": _of(torch.int32, 1, 1),
        "x.scales": torch.rand(1, 8).half(),
        "x.g_idx": torch.zeros(8, dtype=torch.int32),
        "x.bias": torch.rand(8).half(),
    },
    "awq": {
        "x.qweight": _of(torch.int32, 8, 1),
        "x.qzeros": _of(torch.int32, 1, 1),
        "x.scales": torch.rand(1, 8).half(),
    },
    "mxfp4": {"x.proj_blocks": _of(UINT8, 2, 8, 1, 16), "x.proj_scales": _of(UINT8, 2, 8, 1)},
    "pack-quantized": {"x.weight_packed": _of(torch.int32, 8, 1), "x.weight_scale": torch.rand(8, 1).half()},
    "torchao": {"x._weight_qdata": _of(INT8, 8, 8), "x._weight_scale": torch.rand(8, 1)},
    "quanto": {"x.weight._data": _of(INT8, 8, 8), "x.weight._scale": torch.rand(8, 1)},
}


def _model(method: str) -> dict[str, torch.Tensor]:
    """Attention and MLP of one layer, and a norm that is not quantized."""
    tensors = {"model.norm.weight": torch.rand(8), "logit_scale": torch.rand(())}
    for module in MODULES:
        tensors |= _linear(method, module)
    return tensors


def _linear(method: str, module: str) -> dict[str, torch.Tensor]:
    return {module + name.removeprefix("x"): tensor.clone() for name, tensor in METHODS[method].items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    return path


def _save(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> None:
    save_file(tensors, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", METHODS)
def test_it_is_not_cast(source: Path, tmp_path: Path, method: str) -> None:
    _save(source, _model(method))
    for path in (source, source / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"is quantized \('.*' scales '.*'\).* or convert without dtype="):
            hf_stream.convert(path, tmp_path / "out", dtype=torch.bfloat16)
    assert not (tmp_path / "out").exists()
    hf_stream.convert(source, tmp_path / "out")
    assert not hf_stream.verify(source, tmp_path / "out")


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_a_config_says_so_too(source: Path, tmp_path: Path, place: str) -> None:
    quantization = {"quant_method": "aqlm"}
    config = {place: {"quantization_config": quantization} if place == "text_config" else quantization}
    _save(source, {"x.codes": _of(INT8, 4, 4), "x.codebooks": torch.rand(4)}, config)
    result = run("convert", source, tmp_path / "out", "--dtype", "bf16")
    assert result.exit_code == 2
    assert "is quantized (config.json says aqlm)" in result.stderr
    assert "load it with transformers, dequantize it there" in result.stderr
    with pytest.raises(CheckpointError, match=r"says aqlm after the layout as well.*give it a new_config"):
        hf_stream.convert(source, tmp_path / "out", dtype=torch.bfloat16, layout=dict)
    assert not (tmp_path / "out").exists()


def test_the_errors_name_the_layout(source: Path, tmp_path: Path) -> None:
    for method, argument in (("fp8", ""), ("compressed-tensors", "suffix='_scale'")):
        _save(source, _model(method))
        with pytest.raises(CheckpointError) as error:
            hf_stream.convert(source, tmp_path / "out", dtype=torch.bfloat16)
        assert f"with dequantize_fp8_blocks({argument}) (--layout dequantize-fp8-blocks)" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_dequantized_on_the_way_is_cast(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    _save(source, _model("fp8"), {"quantization_config": {"quant_method": "fp8"}})
    hf_stream.convert(source, tmp_path / "out", layout=dequantize_fp8_blocks(dtype=torch.float32), dtype=dtype)
    found = load_file(tmp_path / "out/model.safetensors")
    before = load_file(source / "model.safetensors")
    for module in MODULES:
        wanted = before[f"{module}.weight"].float() * before[f"{module}.weight_scale_inv"]
        assert same_bits(found[f"{module}.weight"], wanted.to(dtype))
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": torch.rand(4).to(FP8)},
        {"w": torch.rand(4), "w_scale": torch.rand(1)},
        {"logit": torch.tensor([True]), "logit_scale": torch.rand(1)},
        {"position_ids": torch.arange(3), "layer.scale": torch.rand(1), "layer.weight": torch.rand(3)},
    ],
)
def test_what_only_looks_like_it_is_cast(source: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    _save(source, tensors, {"quantization_config": None, "vision_config": {"quantization_config": {}}})
    hf_stream.convert(source, tmp_path / "out", dtype=torch.bfloat16)
    found = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)


QKV = [f"{{p:*}}.self_attn.{name}_proj.weight" for name in "qkv"]
TEARING: dict[str, Any] = {
    "packed_qkv": packed_qkv(),
    "packed_gate_up": packed_gate_up(),
    "a renamed weight": Layout([Rename("{p:*}.q_proj.weight", "{p}.query.weight")]),
    "a transposed weight": Layout([Transpose("{p:*}.q_proj.weight")]),
    "a cast weight": Layout([Cast("{p:+}.weight", torch.bfloat16)]),
    "all cast": Layout([Cast("{p:+}", torch.bfloat16)]),
    "computed": Layout([Apply("{p:*}.q_proj.weight", "{p}.q_proj.weight", lambda w: w.float())]),
    "a function": lambda tensors: {n: t.float() if n.endswith("q_proj.weight") else t for n, t in tensors.items()},
}


@pytest.mark.parametrize(
    ("method", "word"),
    [
        (method, word)
        for method in ("fp8", "compressed-tensors", "bitsandbytes 8")
        for word in TEARING
        if "cast" not in word or method != "bitsandbytes 8"  # whose codes are whole numbers, which casts leave alone
    ],
)
def test_no_layout_parts_codes_from_scales(source: Path, tmp_path: Path, method: str, word: str) -> None:
    tensors = _model(method)
    tensors = {name: torch.cat([t, t]) if t.shape == (8, 8) else t for name, t in tensors.items()}
    _save(source, tensors)
    words = r"together they are a quantized weight; .* or add rules"
    with pytest.raises(LayoutError, match=words):
        hf_stream.convert(source, tmp_path / "out", layout=TEARING[word])
    with pytest.raises(LayoutError, match=words):
        hf_stream.verify(source, source, layout=TEARING[word])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", METHODS)
def test_packing_takes_all_or_nothing(source: Path, method: str) -> None:
    _save(source, _model(method))
    checkpoint = hf_stream.open_checkpoint(source)
    pack = packed_qkv() | packed_gate_up()
    if {"x.weight", "x.bias"} & METHODS[method].keys():
        with pytest.raises(LayoutError, match="together they are a quantized weight"):
            hf_stream.plan_conversion(checkpoint, layout=pack)
    else:
        plan = hf_stream.plan_conversion(checkpoint, layout=pack)
        assert all(plan.tensors[name] is tensor for name, tensor in checkpoint.items())


def test_experts_are_not_stacked_without_their_scales(source: Path) -> None:
    tensors = {}
    for expert in range(2):
        for name in ("gate", "up", "down"):
            tensors |= _linear("fp8", f"model.layers.0.mlp.experts.{expert}.{name}_proj")
    _save(source, tensors)
    with pytest.raises(LayoutError, match=r"goes elsewhere in this layout, and '.*weight_scale_inv' stays"):
        hf_stream.plan_conversion(source, layout=stacked_experts())
    merged = hf_stream.plan_conversion(source, layout=dequantize_fp8_blocks() | stacked_experts())
    assert merged.tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (2, 16, 8)


def test_rules_that_take_all_parts_along_are_welcome(source: Path, tmp_path: Path) -> None:
    tensors = _model("compressed-tensors")
    _save(source, tensors)
    scales = [name + "_scale" for name in QKV]
    layouts = {
        "joined": packed_qkv() | Layout([Concat(scales, "{p}.self_attn.qkv_proj.weight_scale")]),
        "renamed": Layout([Rename("model.{rest:+}", "{rest}")]),
        "without scales": Layout([Drop("{p:*}.weight_scale")]),
        "some": lambda all_of_it: {name: t for name, t in all_of_it.items() if "norm" in name},
    }
    for word, layout in layouts.items():
        hf_stream.convert(source, tmp_path / word, layout=layout)
    joined = load_file(tmp_path / "joined/model.safetensors")
    module = "model.layers.0.self_attn.qkv_proj"
    assert joined[f"{module}.weight"].shape == (24, 8)
    packed = dequantize_fp8_blocks(suffix="_scale")(joined)[f"{module}.weight"]
    apart = (dequantize_fp8_blocks(suffix="_scale") | packed_qkv())(tensors)[f"{module}.weight"]
    assert same_bits(packed, apart)
