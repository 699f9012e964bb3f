"""Rules that find nothing: counted, said, or refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import hf_stream
from hf_stream.errors import LayoutError
from hf_stream.layouts import (
    AnyOf,
    Apply,
    Cast,
    Concat,
    Drop,
    Layout,
    Rearrange,
    Rename,
    Slice,
    Split,
    Stack,
    Transpose,
    Unstack,
    dequantize_fp8_blocks,
    meta_llama,
    packed_gate_up,
    packed_qkv,
)

Tensors = dict[str, torch.Tensor]

SEPARATE = {
    f"model.layers.{i}.self_attn.{x}_proj.weight": torch.arange(16.0).view(4, 4) + i for i in range(2) for x in "qkv"
}
PACK = packed_qkv()
MISSPELT = Layout([PACK, Rename("modle.{rest:+}", "{rest}")])


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "hf_stream")
    return caplog


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = (record for record in caplog.records if record.name.startswith("hf_stream"))
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]


def test_every_rule_is_counted() -> None:
    layout = Layout([PACK, Drop("model.layers.{i}.x", "y")]) | Layout([Cast("{name:+}", torch.float16)])
    _, matches = layout.with_matches({**SEPARATE, "model.layers.0.x": torch.ones(1), "y": torch.ones(1)})
    assert [(entry.rule.partition("(")[0], entry.tensors) for entry in matches.rules] == [
        ("AnyOf", 6),
        ("Drop", 2),
        ("Cast", 2),
    ]
    assert (matches.tensors, matches.problem()) == (8, None)


@pytest.mark.parametrize(
    ("layout", "tensors", "facts"),
    [
        # A misspelt rule among working ones.
        (MISSPELT, SEPARATE, ["1 of the layout's 2 rules", "Rename('modle", "nearest names", *list(SEPARATE)[:1]]),
        (Layout([packed_gate_up(), PACK]), SEPARATE, ["1 of the layout's 2 rules", "mlp.gate_proj", "no name resembl"]),
        (PACK | Layout([Rename("{p:*}.qkv_prj.weight", "{p}.w")]), SEPARATE, ["qkv_prj", "self_attn.qkv_proj.weight'"]),
        # One of several patterns.
        (
            Layout([Transpose([f"model.layers.0.self_attn.{x}.weight" for x in ("q_proj", "k_prj")])]),
            SEPARATE,
            ["1 of the layout's 1 rule found", "'model.layers.0.self_attn.k_prj.weight' fits no name", "k_proj.weight"],
        ),
        # Nothing at all, the wrong direction, and what is converted already.
        (packed_gate_up(), SEPARATE, ["matched none of the 6 tensors, e.g. 'model.layers.0.self_attn.q_proj.weight'"]),
        (PACK.inverse, SEPARATE, ["none of the 6", "wrong direction, or already converted?"]),
        (PACK, PACK(SEPARATE), ["none of the 2", "'model.layers.0.self_attn.qkv_proj.weight' has the form", "already"]),
        (dequantize_fp8_blocks(), SEPARATE, ["none of the 6 tensors", "dequantize_fp8_blocks", "no weight is FP8"]),
        (dequantize_fp8_blocks().scoped("x."), SEPARATE, ["none of the 6 tensors", "no weight is FP8"]),
        (PACK | dequantize_fp8_blocks(), SEPARATE, ["1 of the layout's 2 rules", "dequantize_fp8_blocks"]),
        (Layout([Rename("q", "w")]).scoped("modle.", ""), SEPARATE, ["none of the 6", "modle.q"]),
    ],
)  # fmt: skip
def test_a_rule_that_finds_nothing_is_said(
    layout: Layout, tensors: Tensors, facts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    layout(tensors)
    (message,) = said(caplog)
    for fact in facts:
        assert fact in message
    if isinstance(layout, Layout):
        caplog.clear()
        list(layout.stream(tensors.items()))
        assert said(caplog) == [message]


@pytest.mark.parametrize(
    "layout",
    [
        PACK,  # one of two families of names
        Layout([]),
        Layout([PACK, Rename("a", "b", optional=True)]),
        Layout([PACK, AnyOf([Rename("a", "b"), Rename("c", "d")], optional=True)]),
        Layout([AnyOf([Rename("a", "b"), *PACK.stages[0][0].alternatives])]),
        Layout([Drop("nothing", optional=True)]),
        Layout([Drop("nothing", optional=True)]).scoped("model."),
        PACK.scoped("model.", "m."),
    ],
)
def test_a_rule_that_need_not_find_anything_is_not(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    result = layout(SEPARATE)
    layout({})
    if "Drop" not in repr(layout):
        layout.inverse(result)
    assert not said(caplog)


@pytest.mark.parametrize(
    "rule",
    [
        Rename("a", "b", optional=True),
        Concat(["a", "b"], "c", optional=True),
        Split("a", ["b", "c"], optional=True),
        Stack("e.{i}", "e", optional=True),
        Unstack("e", "e.{i}", optional=True),
        Transpose("a", optional=True),
        Rearrange("a", "b c -> c b", optional=True),
        Cast("a", torch.float32, inverse=torch.float16, optional=True),
        Apply("a", "b", torch.neg, torch.neg, optional=True),
        Slice("a", 0, 0, 1, optional=True),
        Drop("a", optional=True),
        AnyOf([Rename("a", "b"), Rename("c", "d")], optional=True),
    ],
)
def test_optional_rules_stay_so(rule: object, caplog: pytest.LogCaptureFixture) -> None:
    layout = Layout([rule])  # type: ignore[list-item]
    assert "optional=True" in repr(layout)
    if not isinstance(rule, Drop | Slice):
        assert layout.inverse.stages[0][0].optional
        assert layout.inverse.inverse == layout
    assert layout.scoped("m.").stages[0][0].optional
    layout.scoped("m.", "n.").with_matches({"m.x": torch.ones(1)})
    layout({"x": torch.ones(1)})
    assert not said(caplog)


def test_alternatives_must_be_rules() -> None:
    with pytest.raises(LayoutError, match="rules are wanted"):
        AnyOf([])
    with pytest.raises(TypeError, match="AnyOf: 'a' is no rule; a rule is an object, such as Rename"):
        AnyOf(["a"])  # type: ignore[list-item]


def test_the_wrong_direction_of_metas_llama_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"'norm\.weight': no tensor of transformers' Llama"):
        meta_llama(num_heads=2).inverse({"norm.weight": torch.ones(4)})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(SEPARATE, tmp_path / "model.safetensors")
    return tmp_path


def test_converting_says_it_once_or_refuses_before_anything_is_written(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = hf_stream.plan_conversion(source, layout=MISSPELT)
    assert [entry.tensors for entry in plan.matches.rules] == [6, 0]
    assert not said(caplog)
    with pytest.raises(LayoutError, match="Rename"):
        hf_stream.convert(source, tmp_path / "new", layout=MISSPELT, strict=True)
    assert not (tmp_path / "new").exists()
    hf_stream.convert(source, tmp_path / "new", layout=MISSPELT)
    (message,) = said(caplog)
    assert "Rename" in message
    assert len(hf_stream.open_checkpoint(tmp_path / "new")) == 2


def test_comparing_and_filling_a_module_say_it_or_refuse(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not hf_stream.verify(source, PACK(SEPARATE), layout=MISSPELT)
    assert len(said(caplog)) == 1
    with pytest.raises(LayoutError, match="modle"):
        hf_stream.verify(source, PACK(SEPARATE), layout=MISSPELT, strict=True)

    module = torch.nn.Linear(4, 12, bias=False)
    layout = Layout([Drop("model.layers.1.{rest:+}"), PACK.scoped("model.layers.0.")])
    to_weight = Layout([Rename("model.layers.0.self_attn.qkv_proj.weight", "weight")])
    hf_stream.load_into(module, hf_stream.open_checkpoint(source), layout=layout | to_weight)
    assert torch.equal(module.weight, torch.cat([SEPARATE[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]))
    caplog.clear()
    wrong = Layout([*(layout | to_weight).stages[0], Drop("x")]) | to_weight
    with pytest.raises(LayoutError, match=r"Drop\('x'\)"):
        hf_stream.load_into(module, hf_stream.open_checkpoint(source), layout=wrong)
    hf_stream.load_into(module, hf_stream.open_checkpoint(source), layout=wrong, strict=False)
    assert len(said(caplog)) == 1


def test_models_say_it_or_refuse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    llama.save_pretrained(tmp_path / "llama")
    phi3_config = Phi3Config(**sizes, **heads, rms_norm_eps=1e-6)
    wrong = Layout([packed_qkv(llama.config), packed_gate_up(), Drop("x")])

    def load(**kwargs: object) -> Phi3ForCausalLM:
        return hf_stream.from_pretrained(  # type: ignore[no-any-return]
            Phi3ForCausalLM, tmp_path / "llama", config=phi3_config, layout=wrong, **kwargs
        )

    model = load()
    assert len(said(caplog)) == 1
    with pytest.raises(LayoutError, match=r"Drop\('x'\)"):
        load(strict=True)
    with pytest.raises(LayoutError, match=r"Drop\('x'\)"), hf_stream.streaming(wrong, strict=True):
        Phi3ForCausalLM.from_pretrained(tmp_path / "llama", config=phi3_config)
    with pytest.raises(LayoutError, match=r"Drop\('x'\)"):
        hf_stream.AutoModelForCausalLM.from_pretrained(
            tmp_path / "llama", config=phi3_config, layout=wrong, strict=True
        )
    caplog.clear()
    back = Layout([packed_qkv(llama.config), packed_gate_up(), Rename("x", "y")]).inverse
    with pytest.raises(LayoutError, match=r"Rename\('y', 'x'\)"):
        hf_stream.save_pretrained(model, tmp_path / "back", layout=back, strict=True)
    assert not (tmp_path / "back").exists()
    hf_stream.save_pretrained(model, tmp_path / "back", layout=back)
    assert len(said(caplog)) == 1
    assert not hf_stream.verify(tmp_path / "llama", tmp_path / "back")
