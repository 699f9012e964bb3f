"""The packed projections against the models of transformers that have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from command_line import run
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    FalconConfig,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.gpt_neox import modeling_gpt_neox

import hf_stream
from hf_stream.errors import LayoutError
from hf_stream.layouts import packed_gate_up, packed_qkv

Tensors = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
}


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def separate(heads: int, kv_heads: int, head_dim: int = 4, hidden: int = 16) -> Tensors:
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    weights = {f"h.0.self_attn.{x}_proj.weight": torch.randn(n, hidden) for x, n in rows.items()}
    return weights | {f"h.0.self_attn.{x}_proj.bias": torch.randn(n) for x, n in rows.items()}


@pytest.mark.parametrize("kv_heads", [8, 2])
@torch.no_grad()
def test_llama_weights_packed_make_phi3_compute_the_same(kv_heads: int) -> None:
    config = LlamaConfig(**SIZES, num_key_value_heads=kv_heads)
    llama = LlamaForCausalLM(config).eval()
    phi3 = Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=kv_heads)).eval()
    layout = packed_qkv(config) | packed_gate_up()
    packed = layout(llama.state_dict())
    assert packed.keys() == phi3.state_dict().keys()
    phi3.load_state_dict(packed)
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(phi3(tokens).logits, llama(tokens).logits)
    assert_same(layout.inverse(packed), dict(llama.state_dict()))


@torch.no_grad()
def test_per_head_is_what_gpt_neox_takes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPTNeoXConfig(**SIZES, attn_implementation="eager")
    model = GPTNeoXModel(config).eval()
    torch.nn.init.normal_(model.layers[0].attention.query_key_value.bias)
    seen = []

    def record(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        seen.append((query, key, value))
        return value.transpose(1, 2), None

    monkeypatch.setattr(modeling_gpt_neox, "eager_attention_forward", record)
    hidden = torch.randn(1, 1, 32)
    model.layers[0].attention(
        hidden, attention_mask=None, position_embeddings=model.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.long))
    )  # at position 0 the rotary embedding changes nothing
    layout = packed_qkv(
        config, style="per_head", names=("attention.q", "attention.k", "attention.v"), dst="attention.query_key_value"
    )
    packed = {f"layers.0.{name}": tensor for name, tensor in model.layers[0].state_dict().items()}
    ours = layout.inverse(packed)
    for x, theirs in zip("qkv", seen[0], strict=True):
        weight, bias = (ours[f"layers.0.attention.{x}.{kind}"] for kind in ("weight", "bias"))
        torch.testing.assert_close((hidden @ weight.T + bias).flatten(), theirs.flatten())
    assert_same(layout(ours), packed)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_per_group_is_what_falcon_takes_apart(kv_heads: int) -> None:
    config = FalconConfig(
        hidden_size=32, num_attention_heads=8, num_kv_heads=kv_heads, new_decoder_architecture=True, bias=True
    )
    tensors = separate(8, kv_heads, hidden=32)
    packed = packed_qkv(config, style="per_group")(tensors)
    attention = FalconAttention(config, layer_idx=0)
    fused = packed["h.0.self_attn.qkv_proj.bias"][None, None]
    query, key, value = (part.flatten() for part in attention._split_heads(fused))
    q, k, v = (tensors[f"h.0.self_attn.{x}_proj.bias"] for x in "qkv")
    assert torch.equal(query, q)
    assert torch.equal(key, k.view(kv_heads, 4).repeat_interleave(8 // kv_heads, 0).flatten())
    assert torch.equal(value, v.view(kv_heads, 4).repeat_interleave(8 // kv_heads, 0).flatten())


@pytest.mark.parametrize("style", ["concat", "per_group"])
@pytest.mark.parametrize("kinds", [("weight",), ("bias",), ("weight", "bias")])
def test_weights_and_biases_are_packed_where_they_are(style: Any, kinds: tuple[str, ...]) -> None:
    tensors = {name: tensor for name, tensor in separate(8, 2).items() if name.endswith(kinds)}
    layout = packed_qkv(style=style, num_heads=8, num_key_value_heads=2)
    packed = layout(tensors)
    assert list(packed) == [f"h.0.self_attn.qkv_proj.{kind}" for kind in kinds]
    assert_same(layout.inverse(packed), tensors)


def test_bert_is_known_by_its_own_names() -> None:
    model = BertModel(BertConfig(**SIZES))
    state = dict(model.state_dict())
    layout = packed_qkv(model.config)
    packed = layout(state)
    attention = model.encoder.layer[1].attention.self
    name = "encoder.layer.1.attention.self.qkv"
    wanted = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])
    assert torch.equal(packed[f"{name}.weight"], wanted)
    assert packed[f"{name}.bias"].shape == (96,)
    assert not any("query" in name for name in packed)
    assert_same(layout.inverse(packed), state)


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 8, "num_key_value_heads": 2},
        SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, head_dim=4),
        {"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}},
        SimpleNamespace(text_config=SimpleNamespace(n_head=8, num_kv_heads=2)),
        LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=64),
        LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=64).to_dict(),
    ],
)
def test_numbers_of_heads_are_read_from_any_config(config: object) -> None:
    assert packed_qkv(config) == packed_qkv(num_heads=8, num_key_value_heads=2)
    assert packed_qkv(config, num_key_value_heads=4) == packed_qkv(num_heads=8, num_key_value_heads=4)


def test_without_numbers_of_heads_unequal_projections_are_refused_with_the_remedy() -> None:
    assert packed_qkv()(separate(8, 8))["h.0.self_attn.qkv_proj.bias"].shape == (96,)
    with pytest.raises(LayoutError, match=r"32, 8, 8. Pass sizes=\(4, 1, 1\), or the numbers of heads"):
        packed_qkv()(separate(8, 2))


def test_numbers_of_heads_that_contradict_the_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"proportion \(2, 1, 1\).*32, 8, 8"):
        packed_qkv(num_heads=8, num_key_value_heads=4)(separate(8, 2))


def test_a_bias_of_the_query_alone_is_refused() -> None:
    tensors = separate(8, 8)
    del tensors["h.0.self_attn.k_proj.bias"]
    with pytest.raises(LayoutError, match=r"'h\.0\.self_attn\.k_proj\.bias' missing"):
        packed_qkv()(tensors)


def test_names_of_the_modules_can_be_given() -> None:
    tensors = {f"layers.0.attn.{x}.weight": torch.randn(4, 4) for x in "qkv"}
    layout = packed_qkv(names=["attn.q", "attn.k", "attn.v"], dst="attn.wqkv")
    assert list(layout(tensors)) == ["layers.0.attn.wqkv.weight"]
    assert list(packed_qkv(names="llama", dst="self_attn.w")(separate(2, 2))) == [
        "h.0.self_attn.w.weight",
        "h.0.self_attn.w.bias",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"style": "per_head", "config": {}}, "needs the number of heads"),
        ({"style": "per_head", "num_heads": 8, "num_key_value_heads": 2}, "Use style='per_group'"),
        ({"style": "per_row"}, "got 'per_row'"),
        ({"num_heads": 8, "num_key_value_heads": 3}, "8 query heads cannot share 3"),
        ({"num_key_value_heads": 3}, "Pass num_heads="),
        ({"names": "gpt"}, "'llama' or 'bert' or 'gpt_neox' or 'bloom' or 'falcon'"),
        ({"names": ["q", "k"], "dst": "qk"}, "three module names"),
        ({"names": ["q", "k", "v"]}, "dst="),
        ({"dst": "qkv"}, "needs names="),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        packed_qkv(**arguments)
    with pytest.raises(LayoutError, match="two modules"):
        packed_gate_up(names="mlp.gate_proj")


def test_parts_with_heads_of_their_own_are_not_dealt_by_those_of_another():
    config = {"text_config": {"num_attention_heads": 4}, "vision_config": {"num_attention_heads": 2}, "dtype": "x"}
    for parts in (
        config,
        SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in list(config.items())[:2]}),
    ):
        with pytest.raises(LayoutError, match=r"2 parts with heads: text_config, vision_config\. .*scoped"):
            packed_qkv(parts, style="per_head")
    packed_qkv(config["text_config"], style="per_head")
    packed_qkv(config)


HIDDEN = {"hidden_size": 32, "vocab_size": 32}
FALCON = {**HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 8, "alibi": False, "eos_token_id": 1}
PACKED_MODELS = {
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        GPTNeoXConfig(**HIDDEN, num_hidden_layers=2, num_attention_heads=8, intermediate_size=48, eos_token_id=1)
    ),
    "bloom": lambda: transformers.BloomForCausalLM(BloomConfig(**HIDDEN, n_layer=2, n_head=8, eos_token_id=1)),
    "falcon, new": lambda: transformers.FalconForCausalLM(
        FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True, bias=True)
    ),
    "falcon, one key head": lambda: transformers.FalconForCausalLM(
        FalconConfig(**FALCON, multi_query=True, new_decoder_architecture=False, bias=False)
    ),
    "falcon, as many key heads": lambda: transformers.FalconForCausalLM(
        FalconConfig(**FALCON, multi_query=False, new_decoder_architecture=False, bias=True)
    ),
}


@pytest.fixture(params=PACKED_MODELS)
def packed_model(request: pytest.FixtureRequest) -> tuple[str, Any]:
    torch.manual_seed(0)
    model = PACKED_MODELS[request.param]().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return request.param.split(",")[0], model


@torch.no_grad()
def test_real_models_with_packed_projections_are_taken_apart_as_their_code_does(packed_model: tuple[str, Any]) -> None:
    names, model = packed_model
    layout = packed_qkv(model.config, names=names)
    ours = layout.inverse(model.state_dict())
    heads, kv_heads = layout.stages[0][0].sizes[0] * layout.stages[0][0].groups, layout.stages[0][0].groups
    prefix, attention = next(
        (name, module) for name, module in model.named_modules() if hasattr(module, "query_key_value")
    )
    hidden = torch.randn(1, 1, 32)
    fused = attention.query_key_value(hidden)
    if names == "gpt_neox":
        # What forward does with it, before it turns it: view, transpose, chunk.
        split = fused.view(1, 1, -1, 3 * attention.head_size).transpose(1, 2).chunk(3, dim=-1)
    else:
        split = (attention._reshape if names == "bloom" else attention._split_heads)(fused)
    for x, theirs in zip("qkv", split, strict=True):
        weight = ours[f"{prefix}.{x}_proj.weight"]
        bias = ours.get(f"{prefix}.{x}_proj.bias", torch.zeros(()))
        rows = (hidden @ weight.T + bias).view(-1, 4)
        if x != "q" and theirs.numel() > rows.numel():
            rows = rows.repeat_interleave(heads // kv_heads, 0)  # as new Falcons do
        torch.testing.assert_close(rows, theirs.reshape(-1, 4))
    assert sum("_proj." in name for name in ours) == 3 * sum("query_key_value" in name for name in model.state_dict())
    assert_same(layout(ours), dict(model.state_dict()))


@torch.no_grad()
def test_real_checkpoints_with_packed_projections_go_there_and_back(
    packed_model: tuple[str, Any], tmp_path: Path
) -> None:
    names, model = packed_model
    model.save_pretrained(tmp_path / "packed")
    layout = packed_qkv(names=names)
    hf_stream.convert(tmp_path / "packed", tmp_path / "separate", layout=layout.inverse, strict=True)
    assert not any("query_key_value" in name for name in hf_stream.open_checkpoint(tmp_path / "separate"))
    loaded = hf_stream.from_pretrained(type(model), tmp_path / "separate", layout=layout, strict=True).eval()
    tokens = torch.arange(12)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    name = f"packed-qkv-{names.replace('_', '-')}"
    assert run("convert", tmp_path / "separate", tmp_path / "again", "-l", name).exit_code == 0
    assert not hf_stream.verify(tmp_path / "packed", tmp_path / "again")


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        (FalconConfig(num_attention_heads=8, multi_query=True), 1),
        ({"n_head": 8, "multi_query": True}, 1),
        ({"text_config": {"n_head": 8, "multi_query": True}}, 1),
        ({"n_head": 8, "multi_query": False}, 8),
        ({"n_head": 8, "num_kv_heads": 2, "multi_query": True, "new_decoder_architecture": True}, 2),
    ],
)
def test_a_flag_says_that_there_is_one_key_head(config: object, kv_heads: int) -> None:
    for style in ("concat", "per_group"):
        wanted = packed_qkv(num_heads=8, num_key_value_heads=kv_heads, style=style)
        assert packed_qkv(config, style=style) == wanted
