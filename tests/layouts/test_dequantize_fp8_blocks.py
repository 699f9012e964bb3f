from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import same_bits
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import hf_stream
from hf_stream import LayoutError
from hf_stream.layouts import Layout, Rename, dequantize_fp8_blocks, from_transformers, get
from hf_stream.lazy import LazyTensor, working_set

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def random_fp8(shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)


def random_scales(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1e-2


def as_deepseek(
    weight: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Each block in turn, times its scale."""
    out = torch.empty(weight.shape, dtype=dtype)
    rows, cols = block_size
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
            out[block] = (weight[block].to(torch.float32) * scale[i, j]).to(dtype)
    return out


def dequantized(weight: torch.Tensor, scale: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Through the layout, real and lazy, which must be the same."""
    layout = dequantize_fp8_blocks(*args, **kwargs)
    tensors = {"x.weight": weight, "x.weight_scale_inv": scale}
    real = layout(tensors)
    lazy = layout({name: LazyTensor.from_tensor(tensor) for name, tensor in tensors.items()})
    assert list(real) == list(lazy) == ["x.weight"]
    assert same_bits(lazy["x.weight"].materialize(), real["x.weight"])
    return real["x.weight"]


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((256, 384), (2, 3)),
        ((128, 128), (1, 1)),
        ((64, 96), (1, 1)),
        ((256, 512), ()),
        ((256, 512), (1,)),
        ((300, 65), (300, 1)),
        ((4, 256, 128), (4, 2, 1)),
        ((4, 256, 128), (4, 256, 1)),
        ((4, 256, 128), (4,)),
        ((4, 256, 128), (4, 1, 1)),
        ((0, 128), (0, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_what_transformers_does(shape: tuple[int, ...], grid: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, scale = random_fp8(shape), random_scales(grid)
    if 0 in shape:
        assert dequantized(weight, scale, dtype=dtype).shape == shape
        return
    plain = Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
    assert same_bits(dequantized(weight, scale, dtype=dtype), plain)


@pytest.mark.parametrize("scales", [torch.float8_e8m0fnu, torch.uint8, torch.bfloat16])
def test_scales_of_other_dtypes_are_read_as_transformers_reads_them(scales: torch.dtype) -> None:
    weight = random_fp8((256, 256), torch.float8_e5m2)
    powers = torch.tensor([[118, 121], [125, 127]], dtype=torch.uint8)
    scale = powers if scales == torch.uint8 else powers.view(torch.float8_e8m0fnu).to(scales)
    plain = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert same_bits(dequantized(weight, scale), plain)


@settings(deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 60),
    st.integers(1, 30),
)
def test_blocks_at_the_edges_are_smaller_and_pieces_do_not_show(
    rows: int, cols: int, high: int, wide: int, piece: int, step: int
) -> None:
    weight, scale = random_fp8((rows, cols)), random_scales((-(-rows // high), -(-cols // wide)))
    want = as_deepseek(weight, scale, (high, wide), torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules[dequantize_fp8_blocks.__module__]
        patch.setattr(module, "_PIECE", piece)
        patch.setattr(module, "_STEP", step)
        assert same_bits(dequantized(weight, scale, (high, wide)), want)


def test_without_a_block_size_the_scales_divide_the_weight() -> None:
    weight, scale = random_fp8((6, 64)), random_scales((6, 2))
    assert same_bits(dequantized(weight, scale, None), as_deepseek(weight, scale, (1, 32), torch.bfloat16))


def test_a_large_weight_is_held_in_pieces() -> None:
    meta = {
        "a": ((1 << 14, 1 << 13), (128, 64)),
        "wide": ((128, 1 << 19), (1, 1 << 12)),
        "one": ((1 << 14, 1 << 13), ()),
    }
    for shape, grid in meta.values():
        # Nothing of this is there: what it takes is known before.
        weight = LazyTensor.from_tensor(torch.empty(1, dtype=torch.float8_e4m3fn)).expand(shape)
        scale = LazyTensor.from_tensor(torch.empty(1)).expand(grid) if grid else torch.ones(())
        result = dequantize_fp8_blocks()({"w": weight, "w_scale_inv": scale})["w"]
        assert result.shape == shape
        assert working_set([result]) < 60e6


def test_other_tensors_pass_through_in_their_order_and_scales_are_dropped() -> None:
    tensors = {
        "norm": torch.ones(3),
        "x.weight_scale_inv": torch.ones(1, 1),
        "x.weight": random_fp8((2, 2)),
        "x.activation_scale": torch.ones(()),
        "y.weight": torch.ones(2, dtype=torch.int8),
    }
    result = dequantize_fp8_blocks()(tensors)
    assert list(result) == ["norm", "x.weight", "y.weight"]
    assert result["norm"] is tensors["norm"]


def test_scales_may_have_other_names() -> None:
    weight, scale = random_fp8((2, 2)), torch.full((1,), 0.5)
    assert list(dequantize_fp8_blocks(suffix="_scale")({"w": weight, "w_scale": scale})) == ["w"]
    renamed = Layout([Rename("{x:+}.scale", "{x}.weight_scale_inv")]) | dequantize_fp8_blocks()
    assert same_bits(
        renamed({"x.weight": weight, "x.scale": scale})["x.weight"], (weight.float() * 0.5).to(torch.bfloat16)
    )


def _compressed(prefix: str = "model.layers.0.") -> dict[str, torch.Tensor]:
    """A layer as compressed-tensors and ModelOpt ship it, with scales of all that is not a weight too."""
    attention = prefix + "self_attn"
    return {
        "logit_scale": torch.ones(()),
        prefix + "layer_scale": torch.ones(8),
        attention + ".q_proj.weight": random_fp8((6, 8)),
        attention + ".q_proj.weight_scale": random_scales((6, 1)),
        attention + ".q_proj.input_scale": torch.ones(1),
        attention + ".k_proj.weight": random_fp8((4, 8), seed=3),
        attention + ".k_proj.weight_scale": random_scales((1,)),
        attention + ".k_proj.output_scale": torch.ones(1),
        attention + ".k_scale": torch.ones(1),
        attention + ".v_scale": torch.ones(1),
        attention + ".o_proj.weight": torch.randn(8, 6),
        "head.input_scale": torch.ones(3),
        "head.weight": torch.randn(3, 8),
    }


def test_scales_of_compressed_tensors_go_and_other_scales_stay() -> None:
    tensors = _compressed()
    result = dequantize_fp8_blocks(suffix="_scale")(tensors)
    layer = "model.layers.0."
    weights = [f"{layer}self_attn.{name}_proj.weight" for name in "qk"]
    kept = ["logit_scale", layer + "layer_scale", layer + "self_attn.o_proj.weight", "head.input_scale", "head.weight"]
    assert sorted(result) == sorted([*weights, *kept])
    assert all(result[name] is tensors[name] for name in kept)
    for name in weights:
        # As transformers' CompressedTensorsDequantize computes it.
        want = (tensors[name].float() * tensors[name + "_scale"].float()).to(torch.bfloat16)
        assert same_bits(result[name], want)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "fbgemm_fp8"},
    ],
)
def test_by_its_name_the_layout_takes_the_scales_of_the_config(quantization: dict[str, Any]) -> None:
    layout = get("dequantize-fp8-blocks", {"quantization_config": quantization})
    assert list(layout(_compressed())) == list(dequantize_fp8_blocks(suffix="_scale")(_compressed()))


def test_the_blocks_of_compressed_tensors_are_in_its_groups() -> None:
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 2]}}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    weight, scale = random_fp8((6, 8)), random_scales((2, 4))
    layout = get("dequantize-fp8-blocks", {"compression_config": settings, "x": 1})
    want = as_deepseek(weight, scale, (4, 2), torch.bfloat16)
    assert same_bits(layout({"w.weight": weight, "w.weight_scale": scale})["w.weight"], want)
    assert layout.new_config({"compression_config": settings, "x": 1}) == {"x": 1}  # type: ignore[attr-defined]


WEIGHT = torch.zeros(256, 200, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({"x": WEIGHT}, {}, r"'x' is torch.float8_e4m3fn, and its scale 'x_scale_inv' is missing"),
        (
            {"x.weight": WEIGHT, "x.weight_scale": torch.ones(1)},
            {},
            r"its scale 'x.weight_scale_inv' is missing. Pass suffix='_scale': there is 'x.weight_scale'",
        ),
        (
            {"x.weight": WEIGHT, "x.weight_scale_inv": torch.ones(1)},
            {"suffix": "_scale"},
            r"its scale 'x.weight_scale' is missing. Pass suffix='_scale_inv': there is 'x.weight_scale_inv'",
        ),
        (
            {"x.weight": WEIGHT, "x.scale": torch.ones(1)},
            {},
            r"There is 'x.scale'; rename it first: Layout.*scale_inv.*\| dequantize_fp8_blocks\(\)",
        ),
        ({"x_scale_inv": torch.ones(2, 2)}, {}, "'x_scale_inv' scales 'x', which is missing"),
        (
            {"x.weight_packed": torch.ones(2, 2, dtype=torch.int32), "x.weight_scale": torch.ones(2, 2)},
            {"suffix": "_scale"},
            "'x.weight_scale' scales 'x.weight', which is missing",
        ),
        (
            {"x": WEIGHT, "x_scale_inv": torch.ones(2, 3)},
            {},
            r"'x': shape \[256, 200\] wants \[2, 2\] for blocks of \[128, 128\], got scales of shape \[2, 3\]",
        ),
        (
            {"x": WEIGHT, "x_scale_inv": torch.ones(3, 2)},
            {"block_size": None},
            r"'x': shape \[256, 200\] wants a grid that divides it evenly, got scales of shape \[3, 2\]",
        ),
        (
            {"x": WEIGHT, "x_scale_inv": torch.ones(3)},
            {"block_size": None},
            r"'x': shape \[256, 200\] wants a grid that divides it evenly, got scales of shape \[3\]",
        ),
        (
            {"x": WEIGHT.view(2, 128, 200), "x_scale_inv": torch.ones(3, 1, 2)},
            {},
            r"'x': shape \[2, 128, 200\] wants as many scales as weights, got scales of shape \[3, 1, 2\]",
        ),
        ({"x": WEIGHT[0], "x_scale_inv": torch.ones(1)}, {}, r"'x': shape \[200\] has no blocks"),
        ({"x": WEIGHT.view(torch.int8), "x_scale_inv": torch.ones(2, 2)}, {}, "'x': torch.int8 with a scale"),
        ({}, {"block_size": (0, 128)}, r"block_size must be two positive numbers, got \(0, 128\)"),
        ({}, {"dtype": torch.float8_e5m2}, "cannot be dequantized to torch.float8_e5m2"),
        ({}, {"dtype": torch.int32}, "cannot be dequantized to torch.int32"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tensors: dict[str, torch.Tensor], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        dequantize_fp8_blocks(**options)(tensors)


def test_it_has_no_inverse_and_says_what_it_is() -> None:
    layout = dequantize_fp8_blocks([64, 32], torch.float32)  # type: ignore[arg-type]  # as a config has it
    assert layout == dequantize_fp8_blocks((64, 32), torch.float32)
    assert repr(layout) == "dequantize_fp8_blocks((64, 32), torch.float32)"
    assert repr(dequantize_fp8_blocks(None, suffix="_s")) == "dequantize_fp8_blocks(None, torch.bfloat16, suffix='_s')"
    with pytest.raises(LayoutError, match=r"dequantize_fp8_blocks\(\(64, 32\), torch\.float32\) cannot be inverted"):
        _ = layout.inverse


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE as DeepSeek ships its models: FP8 blocks, scales in another shard than their weights."""
    path = tmp_path_factory.mktemp("fp8")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, dtype="bfloat16")
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for seed, (name, tensor) in enumerate(load_file(path / "model.safetensors").items()):
        if name.endswith("_proj.weight"):
            shards[0][name] = random_fp8(tuple(tensor.shape), seed=seed)
            grid = tuple(-(-extent // 128) for extent in tensor.shape)
            shards[1][name + "_scale_inv"] = random_scales(grid, seed)
        else:
            shards[0][name] = tensor
    (path / "model.safetensors").unlink()
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": BLOCKS}))
    return path


def test_a_converted_model_is_the_one_that_transformers_loads(quantized: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(quantized).state_dict()
    assert {tensor.dtype for tensor in plain.values()} == {torch.bfloat16}

    hf_stream.convert(quantized, tmp_path / "out", layout=dequantize_fp8_blocks(), verify=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    before = json.loads((quantized / "config.json").read_text())
    assert config == {name: value for name, value in before.items() if name != "quantization_config"}
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert ours.keys() == plain.keys()
    assert all(same_bits(ours[name], plain[name]) for name in plain)

    hf_stream.convert(quantized, tmp_path / "full", layout=dequantize_fp8_blocks(dtype=torch.float32))
    assert json.loads((tmp_path / "full" / "config.json").read_text())["dtype"] == "float32"


def test_it_goes_on_into_the_tensors_in_memory(quantized: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(quantized).state_dict()
    config = json.loads((quantized / "config.json").read_text())
    layout = dequantize_fp8_blocks() | from_transformers(config)
    assert repr(layout).startswith("dequantize_fp8_blocks('config', torch.bfloat16) | from_transformers(Qwen3Moe")
    assert not hf_stream.verify(quantized, plain, layout=layout)
    assert "quantization_config" not in layout.new_config(config)


def test_a_run_is_taken_up_again(quantized: Path) -> None:
    plans = [hf_stream.plan_conversion(quantized, layout=dequantize_fp8_blocks(dtype=d)) for d in DTYPES]
    assert plans[0].fingerprint() == plans[1].fingerprint() != plans[2].fingerprint()


DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16]
