"""Sizes that a layout does not have are read from the model's config, wherever that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import hf_stream
from hf_stream.checkpoint.config import config_of
from hf_stream.errors import CheckpointError, LayoutError
from hf_stream.layouts import (
    Layout,
    Rename,
    dequantize_fp8_blocks,
    from_transformers,
    meta_llama,
    packed_gate_up,
    packed_qkv,
    stacked_experts,
    swift_transformer,
)

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROWS = {"q": 16, "k": 8, "v": 8}
Tensors = dict[str, torch.Tensor]


def separate() -> Tensors:
    torch.manual_seed(0)
    return {f"layers.{i}.self_attn.{x}_proj.weight": torch.randn(n, 8) for i in range(2) for x, n in ROWS.items()}


def assert_same(found: Any, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    save_file(separate(), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.mark.parametrize("style", [None, "per_group"])
def test_packing_takes_the_heads_from_the_config_beside_the_checkpoint(
    style: Any, source: Path, tmp_path: Path
) -> None:
    layout = packed_qkv(style=style)
    wanted = packed_qkv(CONFIG, style=style)(separate())
    hf_stream.convert(source, tmp_path / "packed", layout=layout)
    packed = hf_stream.open_checkpoint(tmp_path / "packed")
    assert_same({name: tensor.materialize() for name, tensor in packed.items()}, wanted)
    # Back, compared, and called on an open checkpoint.
    hf_stream.convert(tmp_path / "packed", tmp_path / "back", layout=layout.inverse)
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), separate())
    assert not hf_stream.verify(source, tmp_path / "packed", layout=layout)
    assert not hf_stream.verify(layout(hf_stream.open_checkpoint(source)), tmp_path / "packed")
    # Among other rules, after other layouts, and in a part.
    prefix = Layout([Rename("{rest:+}", "m.{rest}")])
    for longer in (
        Layout([layout, Rename("x", "y", optional=True)]) | prefix,
        prefix | layout.scoped("m"),
        prefix | (lambda tensors: tensors) | layout.scoped("m."),
    ):
        assert not hf_stream.verify(source, prefix(wanted), layout=longer)


def test_a_file_alone_takes_the_config_that_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (source / "config.json").rename(tmp_path / "elsewhere" / "config.json")
    file, layout = source / "model.safetensors", packed_qkv(style="per_group")
    wanted = packed_qkv(CONFIG, style="per_group")(separate())
    with pytest.raises(LayoutError, match="style 'per_group' needs the number of heads"):
        hf_stream.convert(file, tmp_path / "packed.safetensors", layout=layout)
    with pytest.raises(LayoutError, match="equal extents wanted"):
        hf_stream.convert(file, tmp_path / "packed.safetensors", layout=packed_qkv())
    for config in (CONFIG, tmp_path / "elsewhere", str(tmp_path / "elsewhere" / "config.json"), LlamaConfig(**CONFIG)):
        hf_stream.convert(file, tmp_path / "packed.safetensors", layout=layout, config=config)
        assert_same(load_file(tmp_path / "packed.safetensors"), wanted)
        assert not hf_stream.verify(file, tmp_path / "packed.safetensors", layout=layout, config=config)


def test_the_command_line_takes_the_config_that_is_named(source: Path, tmp_path: Path) -> None:
    (source / "config.json").rename(tmp_path / "heads.json")
    file, options = source / "model.safetensors", ("-l", "packed-qkv-per-group")
    result = run("convert", file, tmp_path / "packed.safetensors", *options)
    assert result.exit_code == 2
    assert "needs the number of heads" in result.stderr
    assert f"There is no config.json beside '{file}' to read sizes from; --config PATH names one." in result.stderr
    options = (*options, "--config", str(tmp_path / "heads.json"))
    assert run("plan", file, *options).exit_code == 0
    assert run("convert", file, tmp_path / "packed.safetensors", *options).exit_code == 0
    wanted = packed_qkv(CONFIG, style="per_group")(separate())
    assert_same(load_file(tmp_path / "packed.safetensors"), wanted)
    assert run("verify", file, tmp_path / "packed.safetensors", *options).exit_code == 0
    for option in (("--config", "x"), ("--scope", "x"), ("--inverse",)):
        result = run("plan", file, *option)
        assert (result.exit_code, "give --layout as well" in result.stderr) == (2, True)


def test_the_command_line_applies_layouts_to_a_part(tmp_path: Path) -> None:
    tensors = {f"{part}.{name}": tensor for part in ("text", "vision") for name, tensor in separate().items()}
    save_file(tensors, tmp_path / "all.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ("-l", "packed-qkv", "--scope", "text=model.text")
    assert run("convert", tmp_path / "all.safetensors", tmp_path / "out.safetensors", *options).exit_code == 0
    wanted = packed_qkv(CONFIG).scoped("text.", "model.text.")(tensors)
    assert_same(load_file(tmp_path / "out.safetensors"), wanted)
    assert {name.split(".")[0] for name in wanted} == {"model", "vision"}
    result = run("convert", tmp_path / "out.safetensors", tmp_path / "back.safetensors", *options, "--inverse")
    assert result.exit_code == 0
    assert_same(load_file(tmp_path / "back.safetensors"), tensors)
    (tmp_path / "mine.py").write_text("def keep(tensors):\n    return tensors\n")
    result = run("plan", tmp_path / "all.safetensors", "-l", f"{tmp_path}/mine.py:keep", "--scope", "text")
    assert (result.exit_code, "is a function and takes no --scope" in result.stderr) == (2, True)
    result = run("plan", tmp_path / "all.safetensors", "-l", "packed-qkv", "--scope", "txt")
    assert (result.exit_code, "the layout matched none" in result.stderr) == (2, True)


def test_a_model_brings_its_config(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **CONFIG, **tokens))
    llama.save_pretrained(tmp_path / "llama")
    config = Phi3Config(**sizes, **CONFIG, **tokens, rms_norm_eps=1e-6)
    layout = Layout([packed_qkv(), packed_gate_up()])

    model = hf_stream.from_pretrained(Phi3ForCausalLM, tmp_path / "llama", config=config, layout=layout)
    packed = Layout([packed_qkv(llama), packed_gate_up()])(llama.state_dict())
    assert_same(model.state_dict(), packed)
    hf_stream.save_pretrained(model, tmp_path / "back", layout=layout.inverse)
    assert not hf_stream.verify(tmp_path / "llama", tmp_path / "back")

    class Both(hf_stream.StreamingMixin, Phi3ForCausalLM):
        pass

    Both.layout = layout
    both = Both.from_pretrained(tmp_path / "llama", config=config)
    assert_same(both.state_dict(), packed)
    both.save_pretrained(tmp_path / "both")
    assert not hf_stream.verify(tmp_path / "llama", tmp_path / "both")

    for arguments in ({}, {"config": llama.config}):
        filled = Phi3ForCausalLM(config)
        hf_stream.load_into(filled, llama.state_dict(), layout=layout, **arguments)
        assert_same(filled.state_dict(), packed)
    filled = Phi3ForCausalLM(config)
    filled.config = None
    hf_stream.load_into(filled, hf_stream.open_checkpoint(tmp_path / "llama"), layout=layout)
    assert_same(filled.state_dict(), packed)


def test_every_ready_made_layout_takes_the_config_beside_the_checkpoint(tmp_path: Path) -> None:
    experts = {f"mlp.experts.{e}.{x}_proj.weight": torch.ones(4, 4) for e in range(3) for x in ("gate", "up", "down")}
    save_file(experts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4}))
    assert stacked_experts()(experts)["mlp.experts.down_proj"].shape == (3, 4, 4)
    with pytest.raises(LayoutError, match=r"'mlp\.experts\.3\.down_proj\.weight' missing"):
        hf_stream.plan_conversion(tmp_path, layout=stacked_experts())

    quantized = {"x.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(2, 2)}
    save_file(quantized, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [4, 4]}}))
    for layout in (dequantize_fp8_blocks(), dequantize_fp8_blocks() | Layout([Rename("{p:*}.weight", "{p}.w")])):
        plan = hf_stream.plan_conversion(tmp_path, layout=layout)
        assert [tensor.dtype for tensor in plan.tensors.values()] == [torch.bfloat16]
        assert "quantization_config" not in plan.new_config({"quantization_config": {}})
    with pytest.raises(LayoutError, match="blocks of"):
        dequantize_fp8_blocks()(quantized)

    queries = {"layers.0.attention.wq.weight": torch.arange(8.0)[:, None]}
    save_file(queries, tmp_path / "model.safetensors")
    (tmp_path / "config.json").unlink()
    (tmp_path / "params.json").write_text(json.dumps({"n_heads": 2}))
    plan = hf_stream.plan_conversion(tmp_path, layout=meta_llama())
    wanted = meta_llama(num_heads=2)(queries)
    assert_same({name: tensor.materialize() for name, tensor in plan.tensors.items()}, wanted)
    assert swift_transformer().with_config({"n_head": 2, "head_dim": 3}) == swift_transformer(heads=2, head_dim=3)


def test_a_config_is_taken_from_whatever_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama", "hidden_size": 16}))
    config = LlamaConfig(**CONFIG, hidden_size=16, num_hidden_layers=1, vocab_size=8, intermediate_size=8)
    wanted = packed_qkv(num_heads=4, num_key_value_heads=2)
    for given in (tmp_path, str(tmp_path / "config.json"), config, config.to_dict(), LlamaForCausalLM(config)):
        assert packed_qkv(given) == wanted
        assert hf_stream.layouts.get("packed-qkv", given) == wanted
        assert meta_llama(given) == meta_llama(num_heads=4, num_key_value_heads=2)
    assert repr(from_transformers(str(tmp_path))) == "from_transformers(LlamaModel)"
    assert config_of(None) is None


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("no/such/path", CheckpointError, "'no/such/path' does not exist; pass the path of a config.json"),
        ("", CheckpointError, "the path is empty"),
        (4, TypeError, "4 is no config"),
        ([CONFIG], TypeError, "is no config"),
        (LlamaConfig, TypeError, "is no config"),
        (torch.nn.Linear(1, 1), LayoutError, "Linear has no config"),
    ],
)
def test_what_is_no_config_is_refused(config: object, error: type[Exception], message: str, tmp_path: Path) -> None:
    for take in (packed_qkv, stacked_experts, meta_llama, lambda c: swift_transformer(config=c)):
        with pytest.raises(error, match=message):
            take(config)
    with pytest.raises(error, match=message):
        hf_stream.load_into(torch.nn.Linear(4, 4), {}, layout=packed_qkv(), config=config, strict=False)


def test_directories_and_files_without_a_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json or params\.json"):
        packed_qkv(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"\0" * 16)
    with pytest.raises(CheckpointError, match="not JSON"):
        packed_qkv(tmp_path / "x.safetensors")
