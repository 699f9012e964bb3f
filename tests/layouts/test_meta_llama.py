"""Meta's Llama: a forward pass as Meta computes it against transformers with the converted weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st
from part_files import DATA, Tensors, lazy, manifest, opened, real, sha256
from safetensors.torch import load_file
from samples import same_bits
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

from hf_stream.errors import LayoutError
from hf_stream.layouts import get, meta_llama
from hf_stream.layouts.meta_llama import META_LLAMA_PARTS
from hf_stream.lazy import reads, working_set

INPUTS = [
    ("llama2_h2", "parts2/*.pth"),
    ("llama2_gqa16_8", "parts2/*.pth"),
    ("llama2_gqa12_4", "single.pt"),
    ("llama2_gqa12_4", "parts4/*.pth"),
]
EPS = 1e-5


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in real(got).items():
        assert same_bits(tensor, wanted[name]), name


def config_of(case: str) -> LlamaConfig:
    sizes = manifest(case)["config"]
    return LlamaConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["dim"],
        intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["q_heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=128,
        rms_norm_eps=EPS,
        max_position_embeddings=64,
    )


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[length, heads, head_dim]: neighbours are one complex number each, turned by its position."""
    length, _, head_dim = x.shape
    freqs = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.outer(torch.arange(length).double(), freqs)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(x.reshape(length, x.shape[1], head_dim // 2, 2))
    return torch.view_as_real(pairs * turns).reshape(x.shape)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def as_meta(tensors: Tensors, tokens: torch.Tensor, heads: int, kv_heads: int, layers: int) -> torch.Tensor:
    """Logits [length, vocab] in float64, with the names and rows of Meta's checkpoints."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    x = w["tok_embeddings.weight"][tokens]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
    for i in range(layers):
        p = f"layers.{i}."
        y = normed(x, w[f"{p}attention_norm.weight"])
        q, k, v = (y @ w[f"{p}attention.w{name}.weight"].T for name in "qkv")
        q = rotated(q.unflatten(-1, (heads, -1)))
        k, v = (t.unflatten(-1, (kv_heads, -1)) for t in (k, v))
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5 + mask
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ w[f"{p}attention.wo.weight"].T
        y = normed(x, w[f"{p}ffn_norm.weight"])
        gated = silu(y @ w[f"{p}feed_forward.w1.weight"].T) * (y @ w[f"{p}feed_forward.w3.weight"].T)
        x = x + gated @ w[f"{p}feed_forward.w2.weight"].T
    return normed(x, w["norm.weight"]) @ w["output.weight"].T


@torch.no_grad()
def logits_of(config: LlamaConfig, tensors: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    model = LlamaForCausalLM(config).double().eval()
    model.load_state_dict(real(tensors))
    logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits


@pytest.mark.parametrize(("case", "files"), INPUTS)
def test_transformers_computes_what_meta_computes(case: str, files: str) -> None:
    sizes, parts = manifest(case)["config"], opened(case, files)
    result = meta_llama(config_of(case))(parts)
    # Norms are in every part; all else is read once.
    assert working_set(result.values()) == 0
    assert sum(region.nbytes for region in reads(result.values())) == sum(t.nbytes for t in result.values())
    tokens = torch.arange(9)
    meta = real(META_LLAMA_PARTS.merge(parts))
    wanted = as_meta(meta, tokens, sizes["q_heads"], sizes["kv_heads"], sizes["layers"])
    got = logits_of(config_of(case), result, tokens)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    # It can be told apart: with the rows as they were the logits are others.
    unturned = {name: t for name, t in real(result).items() if "q_proj" not in name} | {
        f"model.layers.{i}.self_attn.q_proj.weight": meta[f"layers.{i}.attention.wq.weight"]
        for i in range(sizes["layers"])
    }
    other = logits_of(config_of(case), unturned, tokens)
    assert (other - wanted).abs().max() > 100 * (got - wanted).abs().max()


@pytest.mark.parametrize(("case", "files"), INPUTS)
def test_parts_merge_as_meta_divides_them(case: str, files: str) -> None:
    hashes = {name: info["sha256"] for name, info in manifest(case)["input_tensors"].items()}
    del hashes["rope.freqs"]
    merged = real(META_LLAMA_PARTS.merge(opened(case, files)))
    assert {name: sha256(tensor) for name, tensor in merged.items()} == hashes


@pytest.mark.parametrize(
    ("case", "files", "parts"),
    [
        ("llama2_h2", "parts2/*.pth", 2),
        ("llama2_gqa16_8", "parts2/*.pth", 2),
        ("llama2_gqa12_4", "parts4/*.pth", 4),
        ("llama2_gqa12_4", "single.pt", None),
    ],
)
def test_there_and_back_are_the_files_of_meta(case: str, files: str, parts: int | None) -> None:
    given = real(opened(case, files))
    layout = meta_llama(config_of(case), parts=parts)
    back = layout.inverse(layout(lazy(given)))
    assert working_set(back.values()) == 0
    assert_same(back, {name: t for name, t in given.items() if not name.startswith("rope.freqs")})


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([(1, 1, 1), (2, 2, 1), (4, 2, 2), (6, 2, 2), (6, 3, 3), (8, 4, 4), (8, 2, 1)]),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 1000),
)
def test_any_sizes_and_parts_there_and_back(heads: tuple[int, int, int], half: int, layers: int, seed: int) -> None:
    num_heads, kv_heads, parts = heads
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=10 * parts,
        hidden_size=2 * half * num_heads,
        intermediate_size=3 * parts,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=EPS,
    )
    model = LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tokens = torch.arange(7)
    meta = real(meta_llama(config).inverse(lazy(state)))
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
    torch.testing.assert_close(as_meta(meta, tokens, num_heads, kv_heads, layers), wanted, rtol=1e-4, atol=1e-3)
    cut = meta_llama(config, parts=parts).inverse(lazy(state))
    assert len(cut) == parts * len(meta)
    back = meta_llama(config, parts=parts)(cut)
    assert working_set(back.values()) == 0
    assert sum(region.nbytes for region in reads(back.values())) == sum(t.nbytes for t in state.values())
    assert_same(back, state)


@pytest.mark.parametrize(
    "config",
    [
        {"dim": 24, "n_heads": 12, "n_kv_heads": 4, "n_layers": 1, "norm_eps": 1e-5, "vocab_size": -1},
        {"n_heads": 12},
        {"num_attention_heads": 12, "num_key_value_heads": 4},
        LlamaConfig(num_attention_heads=12, num_key_value_heads=4, hidden_size=24),
        None,
    ],
)
def test_heads_come_from_any_config_or_from_the_frequencies(config: object) -> None:
    tensors = opened("llama2_gqa12_4", "parts4/*.pth")
    wanted = real(meta_llama(num_heads=12, num_key_value_heads=4)(tensors))
    assert_same(get("meta-llama", config)(tensors), wanted)
    without = {name: t for name, t in tensors.items() if not name.startswith("rope.freqs")}
    if config is not None:
        assert_same(meta_llama(config)(without), wanted)
        return
    for layout, lacking in (
        (meta_llama(), without),
        (meta_llama().inverse, wanted),
        (meta_llama(num_key_value_heads=4), without),
    ):
        with pytest.raises(LayoutError, match=r"number of heads is not known\. Pass config= or num_heads="):
            layout(lacking)


def test_the_parts_of_llama_3_have_rows_of_the_embedding() -> None:
    embedding = torch.randn(8, 6)
    parts = {f"tok_embeddings.weight.part_{i}": half for i, half in enumerate(embedding.chunk(2))}
    parts |= {f"norm.weight.part_{i}": torch.ones(6) for i in range(2)}
    assert torch.equal(meta_llama()(parts)["model.embed_tokens.weight"], embedding)


@pytest.mark.parametrize("params", [None, {"dim": 24, "n_heads": 12, "n_kv_heads": 4}, {"n_heads": 6}])
@torch.no_grad()
def test_the_command_line_converts_parts_and_reads_params_json(params: dict[str, int] | None, tmp_path: Path) -> None:
    shutil.copytree(DATA / "llama2_gqa12_4" / "input" / "parts4", tmp_path / "in")
    if params is not None:
        (tmp_path / "in" / "params.json").write_text(json.dumps(params))
    result = run("convert", tmp_path / "in" / "consolidated.*.pth", tmp_path / "out", "--layout", "meta-llama")
    if params == {"n_heads": 6}:
        assert result.exit_code == 2
        assert "layout 'meta-llama': 'layers.0.attention.wq.weight' has shape [1536, 24]" in result.stderr
        assert not (tmp_path / "out").exists()
        return
    assert result.exit_code == 0
    config = config_of("llama2_gqa12_4")
    config.save_pretrained(tmp_path / "out")
    model, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    again = run("convert", tmp_path / "out", tmp_path / "meta.safetensors", "--layout", "meta-llama", "--inverse")
    assert again.exit_code == 0
    meta = load_file(tmp_path / "meta.safetensors")
    assert_same(meta, real(META_LLAMA_PARTS.merge(opened("llama2_gqa12_4", "single.pt"))))
    tokens = torch.arange(9)
    wanted = as_meta(meta, tokens, 12, 4, 1)
    got = model.double()(tokens[None]).logits[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_tied_weights_are_written_out_for_meta(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    meta = meta_llama(config).inverse(tensors)
    assert torch.equal(meta["output.weight"], tensors["model.embed_tokens.weight"])


def test_frequencies_of_older_checkpoints_are_left_out() -> None:
    meta = {"layers.0.attention.inner_attention.rope.freqs": torch.ones(4), "norm.weight": torch.ones(4)}
    assert list(meta_llama()(meta)) == ["model.norm.weight"]
    hf = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.norm.weight": torch.ones(4)}
    assert list(meta_llama().inverse(hf)) == ["norm.weight"]


@pytest.mark.parametrize("files", ["parts4/*0[012].pth", "parts4/*00.pth"])
@pytest.mark.parametrize("arguments", [{}, {"num_heads": 12}, {"num_heads": 12, "num_key_value_heads": 4}])
def test_a_part_that_was_not_opened_is_noticed(files: str, arguments: dict[str, int]) -> None:
    tensors = opened("llama2_gqa12_4", files)
    with pytest.raises(LayoutError, match=r"with all parts joined.*Open all parts of the checkpoint"):
        meta_llama(**arguments)(tensors)


W = "layers.0.attention.{}.weight"


@pytest.mark.parametrize(
    ("layout", "shapes", "message"),
    [
        (meta_llama(), {"layers.0.attention.wq.bias": (4,)}, "'layers.0.attention.wq.bias': no tensor of Meta's Llama"),
        (meta_llama(num_heads=3), {W.format("wq"): (8, 2)}, "shape [8, 2], which are not 3 heads. Check num_heads"),
        (
            meta_llama(num_heads=2),
            {W.format("wq"): (8, 2), "rope.freqs": (1,)},
            "[8, 2], which are not 2 heads of 2 rows, as rope.freqs tells",
        ),
        (meta_llama(num_heads=2), {W.format("wq"): (6, 2)}, "cannot be heads of 3 rows with two halves each"),
        (meta_llama(), {W.format("wq"): (6, 2), "rope.freqs": (2,)}, "cannot be heads of 4 rows with two halves each"),
        (meta_llama(), {W.format("wq"): (6, 2), "rope.freqs": (0,)}, "cannot be heads of 0 rows"),
        (
            meta_llama(num_heads=4, num_key_value_heads=2),
            {W.format("wq"): (8, 2), W.format("wk"): (8, 2)},
            "'layers.0.attention.wk.weight' has shape [8, 2]; 2 key heads of 2 rows are 4 rows",
        ),
        (meta_llama(num_heads=2), {W.format("wk"): (8, 2)}, "'layers.0.attention.wq.weight' is missing beside"),
        (
            meta_llama(num_heads=2).inverse,
            {"model.layers.0.self_attn.q_norm.weight": (4,)},
            "q_norm.weight': no tensor",
        ),
        (meta_llama(num_heads=6, parts=4).inverse, {"norm.weight": (4,)}, "num_heads=6 cannot be shared out among 4"),
        (
            meta_llama(num_heads=8, num_key_value_heads=2, parts=4).inverse,
            {"norm.weight": (4,)},
            "num_key_value_heads=2 cannot be shared out among 4 parts",
        ),
    ],
)
def test_names_and_sizes_that_do_not_fit_are_refused(
    layout: Any, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        layout({name: torch.ones(shape) for name, shape in shapes.items()})


def test_it_says_what_it_is() -> None:
    layout = meta_llama({"n_heads": 8, "n_kv_heads": 2}, parts=2)
    assert repr(layout.inverse) == "meta_llama(num_heads=8, num_key_value_heads=2, parts=2).inverse"
    assert layout.inverse.inverse == layout != meta_llama(num_heads=8)
    assert repr(meta_llama()) == "meta_llama()"
    with pytest.raises(LayoutError, match="parts must be at least 1, got -1"):
        meta_llama(parts=-1)
