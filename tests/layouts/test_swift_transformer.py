"""SwiftTransformer's layout against what its own converter wrote, and against plain cutting with torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from part_files import DATA, Tensors, hf_tensors, lazy, manifest, opened, real, sha256
from safetensors.torch import load_file
from samples import same_bits
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import hf_stream
from hf_stream import layouts
from hf_stream.errors import LayoutError
from hf_stream.layouts import Layout, Rename, swift_transformer
from hf_stream.layouts.meta_llama import META_LLAMA_PARTS
from hf_stream.lazy import reads, working_set

DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
INPUTS = [
    ("opt_h2", "input/single.pt"),
    ("opt_h2", "input/parts2/*.pt"),
    ("opt_h2", "input/parts16/*.pt"),
    ("opt_h2", "hf"),
    ("opt_h8", "input/parts2/*.pt"),
    ("opt_h8", "hf"),
    ("llama2_h2", "input/parts2/*.pth"),
    ("llama2_gqa16_8", "input/parts2/*.pth"),
    ("llama2_gqa12_4", "input/single.pt"),
    ("llama2_gqa12_4", "input/parts4/*.pth"),
    ("cast_special", "input/single.pt"),
]
LAYER = "decoder.layers.0."


def metaseq(hidden: int = 64, ffn: int = 16, layers: int = 2, vocab: int = 8) -> Tensors:
    torch.manual_seed(0)
    tensors = {
        "decoder.version": torch.tensor([3.0]),
        "decoder.embed_tokens.weight": torch.randn(vocab, hidden),
        "decoder.embed_positions.weight": torch.randn(7, hidden),
        "decoder.layer_norm.weight": torch.randn(hidden),
        "decoder.layer_norm.bias": torch.randn(hidden),
    }
    for layer in range(layers):
        shapes = {
            "self_attn.qkv_proj": (3 * hidden, hidden),
            "self_attn.out_proj": (hidden, hidden),
            "fc1": (ffn, hidden),
            "fc2": (hidden, ffn),
        }
        for module, shape in shapes.items():
            tensors[f"decoder.layers.{layer}.{module}.weight"] = torch.randn(shape)
            tensors[f"decoder.layers.{layer}.{module}.bias"] = torch.randn(shape[0])
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            tensors |= {f"decoder.layers.{layer}.{norm}.{kind}": torch.randn(hidden) for kind in ("weight", "bias")}
    return tensors


def meta(hidden: int = 24, heads: int = 4, kv_heads: int = 2, dim: int = 6, ffn: int = 16) -> Tensors:
    torch.manual_seed(1)
    shapes = {
        "tok_embeddings.weight": (8, hidden),
        "norm.weight": (hidden,),
        "output.weight": (8, hidden),
        "layers.0.attention.wq.weight": (heads * dim, hidden),
        "layers.0.attention.wk.weight": (kv_heads * dim, hidden),
        "layers.0.attention.wv.weight": (kv_heads * dim, hidden),
        "layers.0.attention.wo.weight": (hidden, heads * dim),
        "layers.0.feed_forward.w1.weight": (ffn, hidden),
        "layers.0.feed_forward.w2.weight": (hidden, ffn),
        "layers.0.feed_forward.w3.weight": (ffn, hidden),
        "layers.0.attention_norm.weight": (hidden,),
        "layers.0.ffn_norm.weight": (hidden,),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in real(got).items():
        assert same_bits(tensor, wanted[name]), name


@pytest.mark.parametrize(("case", "files"), INPUTS)
def test_every_tensor_is_the_one_that_the_original_wrote(case: str, files: str) -> None:
    tensors = hf_stream.open_checkpoint(DATA / case / files)

    divided = swift_transformer()(tensors)

    outputs = manifest(case)["outputs"]
    assert outputs
    for dtype, wanted in outputs.items():
        got = hf_stream.materialize({name: t.to(DTYPES[dtype]) for name, t in divided.items()})
        assert {f"{name}.pt" for name in got} == wanted.keys()
        for name, tensor in got.items():
            facts = wanted[f"{name}.pt"]
            assert (list(tensor.shape), sha256(tensor)) == (facts["shape"], facts["sha256"]), name


@pytest.mark.parametrize(("case", "files"), INPUTS)
def test_nothing_is_computed_and_each_byte_is_read_once(case: str, files: str) -> None:
    tensors = hf_stream.open_checkpoint(DATA / case / files)

    divided = swift_transformer()(tensors)

    assert working_set(divided.values()) == 0
    kept = {name: t for name, t in divided.items() if not name.startswith("decoder.output_projection")}
    assert sum(region.nbytes for region in reads(kept.values())) == sum(t.numel() * t.itemsize for t in kept.values())


@pytest.mark.parametrize(("case", "files"), INPUTS)
def test_the_inverse_gives_the_names_of_transformers(case: str, files: str) -> None:
    layout = swift_transformer()
    divided = layout(hf_stream.open_checkpoint(DATA / case / files))

    restored = layout.inverse(divided)

    if "opt" in case:
        wanted = hf_tensors(case)
        # SwiftTransformer does not keep these rows, and transformers does not use them.
        wanted["model.decoder.embed_positions.weight"][:2] = 0
        assert_same(restored, wanted)
    else:
        source = hf_stream.open_checkpoint(DATA / case / files)
        assert_same(restored, real(layouts.meta_llama(num_heads=manifest(case)["q_heads"])(source)))
    assert_same(layout.inverse.inverse(restored), real(divided))


@pytest.mark.parametrize("case", ["opt_h2", "opt_h8"])
def test_a_model_that_comes_back_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    source, there, back = DATA / case / "hf", tmp_path / "there", tmp_path / "back"
    layout = swift_transformer(config={"num_attention_heads": manifest(case)["config"]["heads"]})

    hf_stream.convert(source, there, layout=layout)
    hf_stream.convert(there, back, layout=layout.inverse)

    model = OPTForCausalLM.from_pretrained(back, dtype=torch.float32, attn_implementation="eager").eval()
    known = load_file(source.parent / "hf_logits.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model(known["input_ids"]).logits, known["logits"], rtol=0, atol=3e-5)


@settings(max_examples=30, deadline=None)
@given(
    tp=st.integers(1, 9),
    heads=st.integers(1, 12),
    groups=st.integers(1, 3),
    dim=st.sampled_from([2, 4]),
    as_lazies=st.booleans(),
)
def test_any_tp_against_plain_slices(tp: int, heads: int, groups: int, dim: int, as_lazies: bool) -> None:
    query, key = heads * groups * tp, heads
    tensors = meta(heads=query, kv_heads=key, dim=dim, ffn=3 * tp)
    layout = swift_transformer(tp, head_dim=dim)

    divided = layout(lazy(tensors) if as_lazies else tensors)

    q, k, v, o = (tensors[f"layers.0.attention.w{x}.weight"] for x in "qkvo")
    by_heads = [w.reshape(-1, dim, 24) for w in (q, k, v)]
    for i in range(tp):
        each, few = query // tp, key // tp
        stop = key if i == tp - 1 else (i + 1) * few
        rows = [by_heads[0][i * each : (i + 1) * each], *(w[i * few : stop] for w in by_heads[1:])]
        plain = {
            "self_attn.qkv_proj": torch.cat(rows).permute(2, 0, 1),
            "self_attn.out_proj": o.T[i * each * dim : (i + 1) * each * dim],
            "fc1": tensors["layers.0.feed_forward.w1.weight"][3 * i : 3 * (i + 1)],
            "fc2": tensors["layers.0.feed_forward.w2.weight"][:, 3 * i : 3 * (i + 1)],
            "fc3": tensors["layers.0.feed_forward.w3.weight"][3 * i : 3 * (i + 1)],
        }
        for module, wanted in plain.items():
            got = divided[f"{LAYER}{module}.weight.tp_{i}"]
            assert same_bits(real({"": got})[""], wanted), (module, i)
    assert len(divided) == 5 + 5 * tp
    assert_same(layouts.meta_llama(num_heads=query).inverse(layout.inverse(divided)), tensors)


def test_models_of_transformers_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    models = [
        LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=24, num_key_value_heads=2)),
        LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=24, head_dim=16, tie_word_embeddings=True)),
        OPTForCausalLM(OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=32, max_position_embeddings=8)),
    ]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
        source = hf_stream.open_checkpoint(tmp_path / str(number))
        layout = swift_transformer(config=model.config)
        divided = layout(source)
        assert divided[f"{LAYER}self_attn.qkv_proj.weight.tp_7"].shape[-1] == getattr(model.config, "head_dim", 8)
        restored = real(layout.inverse(divided))
        for name, tensor in source.items():
            kept = slice(2 if "positions" in name else 0, None)
            assert same_bits(restored[name][kept], tensor.materialize()[kept]), name


def test_an_opt_without_a_head() -> None:
    tensors = {name.removeprefix("model."): t for name, t in hf_tensors("opt_h2").items()}

    assert_same(swift_transformer()(tensors), swift_transformer()(hf_tensors("opt_h2")))


def test_an_output_projection_of_its_own_is_not_looked_at() -> None:
    tensors = metaseq()
    wanted = swift_transformer()(tensors)
    own = {"decoder.output_projection.weight": torch.randn(3, 3)}

    assert_same(swift_transformer()({**tensors, **own}), wanted)
    assert wanted["decoder.output_projection.weight"] is wanted["decoder.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("ffn", "hidden", "dim"), [(8192, 128, 64), (10240, 160, 80), (8200, 256, 128), (10248, 256, 128), (16, 64, 64)]
)
def test_the_rows_of_a_head_of_opt_are_guessed_as_by_the_original(ffn: int, hidden: int, dim: int) -> None:
    tensors = {name: torch.empty(t.shape, device="meta") for name, t in metaseq(hidden, ffn, 1).items()}

    divided = swift_transformer()(tensors)

    assert divided[f"{LAYER}self_attn.qkv_proj.weight.tp_7"].shape[-1] == dim
    total = sum(divided[f"{LAYER}self_attn.qkv_proj.bias.tp_{i}"].shape[0] for i in range(8))
    assert total == 3 * hidden // dim


def test_heads_are_taken_from_the_config_and_from_arguments_before_it() -> None:
    tensors = metaseq(hidden=64)

    def dims(**arguments: Any) -> int:
        divided: Tensors = swift_transformer(**arguments)(tensors)
        return divided[f"{LAYER}self_attn.qkv_proj.weight.tp_0"].shape[-1]

    assert dims() == 64
    assert dims(config={"num_attention_heads": 16}) == 4
    assert dims(config={"n_heads": 32}) == 2
    assert dims(config={"num_attention_heads": 16}, heads=8) == 8
    assert dims(head_dim=2) == 2
    assert dims(heads=4, kv_heads=4, head_dim=16) == 16


def test_the_registry_knows_it() -> None:
    layout = layouts.get("swift-transformer", {"num_attention_heads": 16})

    assert layout == swift_transformer(config={"num_attention_heads": 16})
    assert repr(layout) == "swift_transformer(8, heads=16)"
    assert repr(layout.inverse) == "swift_transformer(8, heads=16).inverse"


def test_it_follows_other_layouts() -> None:
    other = {f"x.{name}": t for name, t in meta().items()}
    layout = Layout([Rename("x.{rest:+}", "{rest}")]) | swift_transformer(2, head_dim=6)

    assert_same(layout(other), swift_transformer(2, head_dim=6)(meta()))


def changed(tensors: Tensors, **changes: Any) -> Tensors:
    return {name: t for name, t in {**tensors, **changes}.items() if t is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (metaseq(ffn=20), r"'decoder.layers.0.fc1.weight' .* cannot be cut into 8 equal pieces along dimension 0"),
        (meta(heads=3, kv_heads=3), r"'decoder.layers.0.self_attn.out_proj.weight' .* cannot be cut into 8"),
        (
            {**metaseq(), "decoder.project_in_dim.weight": torch.ones(64, 32)},
            r"'decoder.project_in.weight': embeddings of another size than the layers, as in OPT-350M",
        ),
        (changed(metaseq(), **{f"{LAYER}fc2.bias": None}), r"'decoder.layers.0.fc2.bias': missing"),
        (
            changed(metaseq(layers=3), **{"decoder.layers.1.fc1.weight": None}),
            r"'decoder.layers.1.fc1.weight': missing",
        ),
        (changed(metaseq(), **{"decoder.layer_norm.weight": None}), r"'decoder.layer_norm.weight': missing"),
        (changed(meta(), **{"output.weight": None}), r"'decoder.output_projection.weight': missing"),
        ({**metaseq(), "decoder.scale": torch.ones(1)}, r"'decoder.scale'"),
        ({**hf_tensors("opt_h2"), "model.extra": torch.ones(1)}, r"'model.extra': of no use to SwiftTransformer"),
        (changed(metaseq(), **{f"{LAYER}fc1.bias": torch.ones(8)}), r"All layers must be alike"),
        (changed(metaseq(layers=1), **{f"{LAYER}fc2.weight": torch.ones(64, 24)}), r"\[64, 24\], \[64, 16\] wanted"),
        (
            changed(metaseq(layers=1), **{f"{LAYER}fc2.bias": torch.ones(16)}),
            r"fc2.bias' has shape \[16\], \[64\] wanted",
        ),
        (changed(metaseq(), **{"decoder.embed_positions.weight": torch.ones(7, 32)}), r"\[5, 32\], \[5, 64\] wanted"),
        (changed(meta(), **{"output.weight": torch.ones(6, 24)}), r"\[6, 24\], \[8, 24\] wanted"),
        (changed(meta(), **{"tok_embeddings.weight": torch.ones(8, 12)}), r"\[8, 12\], \[8, 24\] wanted"),
        (changed(meta(), **{"layers.0.feed_forward.w3.weight": torch.ones(8, 24)}), r"\[8, 24\], \[16, 24\] wanted"),
        (changed(meta(), **{"layers.0.ffn_norm.weight": torch.ones(12)}), r"\[12\], \[24\] wanted"),
        (changed(meta(), **{"norm.weight": torch.ones(())}), r"'decoder.layer_norm.weight' is a single number"),
        # The last of four parts is not there.
        (
            {name: t for name, t in META_LLAMA_PARTS.cut(meta(), 4).items() if not name.endswith(".part_3")},
            r"'decoder.embed_tokens.weight' has shape \[8, 18\], \[8, 24\] wanted",
        ),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, r"knows no other models"),
        ({f"{LAYER}fc1.weight.tp_0": torch.ones(2, 2)}, r"is a partition already"),
    ],
)
def test_models_that_do_not_fit_are_refused(tensors: Tensors, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        swift_transformer(head_dim=64 if "decoder.layer_norm.bias" in tensors else 6)(tensors)


def test_biases_of_llama_are_refused() -> None:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        attention_bias=True,
    )

    with pytest.raises(LayoutError, match=r"q_proj\.bias"):
        swift_transformer(config=config)(LlamaForCausalLM(config).state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 5}, r"24 query rows are not heads of 5"),
        ({"heads": 5}, r"24 query rows are not 5 heads of 4"),
        ({"heads": 4, "kv_heads": 4}, r"12 key rows are not 4 heads of 6"),
        ({}, r"24 query rows are not heads of 128"),
    ],
)
def test_heads_that_do_not_suit_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        swift_transformer(1, **arguments)(meta())


def test_tp_must_be_positive() -> None:
    with pytest.raises(LayoutError, match="tp must be at least 1, got 0"):
        swift_transformer(0)


def test_partitions_that_are_not_all_there_are_refused() -> None:
    layout = swift_transformer(4, head_dim=6)
    divided = layout(meta())

    def refused(message: str, layout: Any = layout, **changes: Any) -> None:
        with pytest.raises(LayoutError, match=message):
            layout.inverse(changed(divided, **changes))

    refused(r"'decoder.layers.0.fc1.weight.tp_2' is missing", **{f"{LAYER}fc1.weight.tp_2": None})
    refused(r"in 4 partitions, and swift_transformer\(8\) wants 8", swift_transformer(8, head_dim=6))
    last = {name: None for name in divided if name.endswith(".tp_3")}
    refused(r"in 3 partitions", **last)
    attention = {name: None for name in divided if "qkv_proj" in name}
    refused(r"'decoder.layers.0.self_attn.qkv_proj.weight.tp_0' is missing", **attention)
    refused(r"'decoder.layer_norm.weight': missing", **{"decoder.layer_norm.weight": None})
    refused(r"whole and in partitions", **{f"{LAYER}fc1.weight": torch.ones(16, 24)})
    norm = "decoder.layer_norm.weight"
    refused(r"in partitions, as it never is", **{norm: None}, **{f"{norm}.tp_{i}": torch.ones(6) for i in range(4)})
    qkv = f"{LAYER}self_attn.qkv_proj.weight.tp_"
    refused(r"heads of 6 wanted", **{f"{qkv}0": divided[f"{qkv}3"], f"{qkv}3": divided[f"{qkv}0"]})
    refused(r"\[hidden, heads, head_dim\] wanted", **{f"{qkv}0": torch.ones(24, 6)})


def test_names_and_shapes_alone_do(tmp_path: Path) -> None:
    """Planning looks at no value, and so at no byte of the tensors."""
    source = opened("opt_h8", "parts2/*.pt")
    metas = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in source.items()}

    divided = swift_transformer()(metas)

    assert {name: t.shape for name, t in divided.items()} == {
        name: t.shape for name, t in swift_transformer()(source).items()
    }
    assert all(re.fullmatch(r"decoder\..*(weight|bias)(\.tp_[0-7])?", name) for name in divided)
