"""metaseq's OPT against what transformers saved of the same weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st
from part_files import DATA, Tensors, hf_tensors, lazy, manifest, opened, real, sha256
from safetensors.torch import load_file, save_file
from samples import same_bits
from transformers import OPTConfig, OPTForCausalLM, OPTModel

import hf_stream
from hf_stream.errors import LayoutError
from hf_stream.layouts import Drop, Layout, metaseq_opt
from hf_stream.layouts.metaseq_opt import METASEQ_OPT_PARTS
from hf_stream.lazy import LazyTensor, reads, working_set

HF_INPUTS = [
    ("opt_h2", "single.pt"),
    ("opt_h2", "parts2/*.pt"),
    ("opt_h2", "parts16/*.pt"),
    ("opt_h8", "parts2/*.pt"),
]
SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 8,
    "ffn_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 6,
    "word_embed_proj_dim": 8,
}


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in real(got).items():
        assert same_bits(tensor, wanted[name]), name


def model_of(**changes: Any) -> OPTForCausalLM:
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**{**SIZES, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def saved(model: OPTForCausalLM, path: Path) -> Tensors:
    """What save_pretrained writes."""
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(("case", "files"), HF_INPUTS)
def test_it_is_what_transformers_saved_and_reads_each_byte_once(case: str, files: str) -> None:
    tensors = opened(case, files)
    wanted = hf_tensors(case)
    result = metaseq_opt()(tensors)
    assert working_set(result.values()) == 0
    assert sum(region.nbytes for region in reads(result.values())) == sum(t.nbytes for t in wanted.values())
    assert_same(result, wanted)


@pytest.mark.parametrize(("case", "files"), HF_INPUTS)
def test_parts_merge_as_metaseq_merges_them(case: str, files: str) -> None:
    whole = real(METASEQ_OPT_PARTS.merge(opened(case, files)))
    hashes = {name: info["sha256"] for name, info in manifest(case)["input_tensors"].items()}
    del hashes["decoder.version"]
    assert {name: sha256(tensor) for name, tensor in whole.items()} == hashes


@pytest.mark.parametrize(
    ("case", "files", "parts"),
    [
        ("opt_h2", "single.pt", None),
        ("opt_h2", "parts2/*.pt", 2),
        ("opt_h2", "parts16/*.pt", 16),
        ("opt_h8", "parts2/*.pt", 2),
    ],
)
def test_the_inverse_gives_the_files_of_metaseq(case: str, files: str, parts: int | None) -> None:
    wanted = {name: t for name, t in real(opened(case, files)).items() if not name.startswith("decoder.version")}
    result = metaseq_opt(parts=parts).inverse(lazy(hf_tensors(case)))
    assert working_set(result.values()) == 0
    assert_same(result, wanted)


@pytest.mark.parametrize(("case", "files"), [("opt_h2", "parts16/*.pt"), ("opt_h8", "parts2/*.pt")])
@torch.no_grad()
def test_a_converted_directory_loads_and_gives_the_logits(case: str, files: str, tmp_path: Path) -> None:
    result = run("convert", DATA / case / "input" / files, tmp_path / "out", "--layout", "metaseq-opt")
    assert result.exit_code == 0
    shutil.copy(DATA / case / "hf" / "config.json", tmp_path / "out")
    model, info = OPTForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    truth = load_file(DATA / case / "hf_logits.safetensors")
    torch.testing.assert_close(model(truth["input_ids"]).logits, truth["logits"], atol=3e-5, rtol=0)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_any_sizes_and_parts_there_and_back(parts: int, rows: int, ffn: int, layers: int, own_output: bool) -> None:
    hidden, vocab = parts * rows, parts * 5
    tensors = {
        "model.decoder.embed_tokens.weight": torch.randn(vocab, hidden),
        "model.decoder.embed_positions.weight": torch.randn(9, hidden),
        "model.decoder.final_layer_norm.weight": torch.randn(hidden),
    }
    for i in range(layers):
        for x in "kvq":
            tensors[f"model.decoder.layers.{i}.self_attn.{x}_proj.weight"] = torch.randn(hidden, hidden)
            tensors[f"model.decoder.layers.{i}.self_attn.{x}_proj.bias"] = torch.randn(hidden)
        tensors[f"model.decoder.layers.{i}.self_attn.out_proj.weight"] = torch.randn(hidden, hidden)
        tensors[f"model.decoder.layers.{i}.fc1.weight"] = torch.randn(parts * ffn, hidden)
        tensors[f"model.decoder.layers.{i}.fc2.weight"] = torch.randn(hidden, parts * ffn)
        tensors[f"model.decoder.layers.{i}.fc2.bias"] = torch.randn(hidden)
    if own_output:
        tensors["lm_head.weight"] = torch.randn(vocab, hidden)
    layout = metaseq_opt(parts=parts)
    cut = layout.inverse(lazy(tensors))
    for i in range(parts):
        qkv = cut[f"decoder.layers.0.self_attn.qkv_proj.weight.part_{i}"].materialize()
        for x, rows_of_x in zip("kvq", qkv.unflatten(0, (3, rows)), strict=True):
            whole = tensors[f"model.decoder.layers.0.self_attn.{x}_proj.weight"]
            assert torch.equal(rows_of_x, whole[i * rows : (i + 1) * rows])
    back = layout(cut)
    assert working_set(back.values()) == 0
    assert sum(region.nbytes for region in reads(back.values())) == sum(t.nbytes for t in tensors.values())
    assert_same(back, tensors)


@torch.no_grad()
def test_opt_350m_with_projections_and_norms_afterwards(tmp_path: Path) -> None:
    model = model_of(word_embed_proj_dim=4, do_layer_norm_before=False)
    tensors = saved(model, tmp_path)
    for parts in (None, 2):
        layout = metaseq_opt(parts=parts)
        metaseq = layout.inverse(tensors)
        assert metaseq["decoder.project_in_dim.weight" + ".part_1" * bool(parts)].shape == (8, 4)
        assert "decoder.project_out_dim.weight" + ".part_0" * bool(parts) in metaseq
        assert not any(name.startswith("decoder.layer_norm") for name in metaseq)
        assert_same(layout(metaseq), tensors)


@torch.no_grad()
def test_an_output_projection_of_its_own_becomes_an_lm_head(tmp_path: Path) -> None:
    model = model_of(tie_word_embeddings=False)
    tensors = saved(model, tmp_path / "hf")
    assert "lm_head.weight" in tensors
    metaseq = metaseq_opt().inverse(tensors)
    assert torch.equal(metaseq["decoder.output_projection.weight"], model.lm_head.weight)
    # Of its own it is whole in every part.
    parts = {f"{name}.part_{i}": t for i in range(2) for name, t in metaseq.items() if "output_projection" in name}
    parts |= {n: t for n, t in metaseq_opt(parts=2).inverse(tensors).items() if "output_projection" not in n}
    (tmp_path / "out").mkdir()
    save_file(real(metaseq_opt()(lazy(parts))), tmp_path / "out" / "model.safetensors", {"format": "pt"})
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "out")
    tokens = torch.arange(5)[None]
    again = OPTForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("as_lazy", [False, True])
def test_a_tied_output_projection_is_left_out(as_lazy: bool, tmp_path: Path) -> None:
    tensors = saved(model_of(), tmp_path)
    assert "lm_head.weight" not in tensors
    for parts in (None, 2):
        metaseq = metaseq_opt(parts=parts).inverse(lazy(tensors) if as_lazy else tensors)
        for name in [name for name in metaseq if name.startswith("decoder.embed_tokens")]:
            metaseq[name.replace("embed_tokens", "output_projection")] = metaseq[name][:]
        assert_same(metaseq_opt()(metaseq), tensors)


def test_an_output_projection_that_is_tied_in_the_file_is_left_out(tmp_path: Path) -> None:
    tensors = saved(model_of(), tmp_path)
    metaseq = metaseq_opt().inverse(tensors)
    metaseq["decoder.output_projection.weight"] = metaseq["decoder.embed_tokens.weight"]
    torch.save({"model": metaseq, "cfg": None}, tmp_path / "tied.pt")
    assert_same(metaseq_opt()(hf_stream.open_checkpoint(tmp_path / "tied.pt")), tensors)


def test_parts_of_an_output_projection_that_are_cut_are_joined() -> None:
    parts = {
        f"decoder.{name}.weight.part_{i}": torch.full((2, 3), float(i))
        for i in range(2)
        for name in ("embed_tokens", "output_projection")
    }
    assert metaseq_opt()(parts)["lm_head.weight"].shape == (4, 3)


def test_the_head_of_a_model_that_ties_is_left_out_on_the_way_back() -> None:
    state = dict(model_of().state_dict())
    assert state["lm_head.weight"].data_ptr() == state["model.decoder.embed_tokens.weight"].data_ptr()
    assert "decoder.output_projection.weight" not in metaseq_opt().inverse(state)
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    assert "decoder.output_projection.weight" in metaseq_opt().inverse(state)


def test_a_decoder_without_its_head_may_lack_the_prefix() -> None:
    model = model_of()
    bare = OPTModel(model.config)
    bare.load_state_dict(model.model.state_dict())
    assert_same(metaseq_opt().inverse(dict(bare.state_dict())), metaseq_opt().inverse(dict(model.state_dict())))


def test_a_part_that_was_not_opened_is_noticed() -> None:
    tensors = {name: t for name, t in opened("opt_h2", "parts16/*.pt").items() if not name.endswith(".part_15")}
    with pytest.raises(LayoutError, match=r"shape \[360, 128\] with all parts joined.* Open all parts"):
        metaseq_opt()(tensors)
    with pytest.raises(LayoutError, match="metaseq's OPT: 16 parts wanted, got 15"):
        metaseq_opt(parts=16)(tensors)


@pytest.mark.parametrize(
    ("layout", "name", "message"),
    [
        (metaseq_opt(), "decoder.layers.0.fc3.weight", "'decoder.layers.0.fc3.weight': no tensor of metaseq's OPT has"),
        (metaseq_opt(), "decoder.layers.0.ffn_layernorm.bias", "ffn_layernorm.bias': no tensor of transformers' OPT"),
        (metaseq_opt(), "flat_param_0.part_0", "'flat_param_0': no tensor of metaseq's OPT"),
        (metaseq_opt().inverse, "model.decoder.layers.0.fc3.weight", "'model.decoder.layers.0.fc3.weight': no tensor"),
        (metaseq_opt().inverse, "score.weight", "'score.weight': no tensor of metaseq's OPT"),
        (metaseq_opt(parts=3).inverse, "model.decoder.layers.0.fc1.bias", "cannot be cut into 3 equal pieces"),
    ],
)
def test_names_and_sizes_that_do_not_fit_are_refused(layout: Any, name: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        layout({name: torch.ones(4)})


def test_what_is_left_out_before_does_no_harm() -> None:
    tensors = {**opened("opt_h2", "single.pt"), "extra": torch.ones(1)}
    assert_same((Layout([Drop("extra")]) | metaseq_opt())(tensors), hf_tensors("opt_h2"))
    scoped = metaseq_opt().scoped("lm.")({f"lm.{n}": t for n, t in tensors.items() if n != "extra"})
    assert scoped.keys() == {f"lm.{name}" for name in hf_tensors("opt_h2")}


def test_it_says_what_it_is() -> None:
    assert repr(metaseq_opt()) == "metaseq_opt()"
    assert repr(metaseq_opt(parts=8).inverse) == "metaseq_opt(parts=8).inverse"
    assert metaseq_opt(parts=8).inverse.inverse == metaseq_opt(parts=8) != metaseq_opt()
    with pytest.raises(LayoutError, match="parts must be at least 1, got 0"):
        metaseq_opt(parts=0)


def test_nothing_is_read_before_a_tensor_is_needed() -> None:
    window = LazyTensor.from_tensor(torch.empty(1)).expand
    tensors = {"decoder.layers.0.self_attn.qkv_proj.weight": window(3 << 20, 1 << 20)}
    query = metaseq_opt()(tensors)["model.decoder.layers.0.self_attn.q_proj.weight"]
    assert query.shape == (1 << 20, 1 << 20)
