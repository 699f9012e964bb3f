"""`convert(dtype=)` gives the files that loading with that dtype and saving gives, in plain transformers."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from architectures import primary_class, random_model, small_config
from safetensors.torch import load_file
from samples import same_bits

import hf_stream
from hf_stream.layouts import Apply, Concat, Layout, Rename, from_transformers

# What each keeps in a dtype of its own: by name in float16 alone, by name always, by how it is made, nothing.
KEEPING = {
    "t5": "wo.weight",
    "gpt_oss": "layernorm.weight",
    "deepseek_v3": "e_score_correction_bias",
    "glm4_moe": "e_score_correction_bias",
    "ernie4_5_moe": "moe_statics",
    "blip-2": "query_tokens",
    "rwkv": "time_decay",
    "nemotron_h": "",
    "llama": "",
    "qwen3_moe": "",
    "bert": "",
    "whisper": "",
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function: a small random model of a type, saved by plain transformers in a dtype, and its class."""
    made = {}

    def of(model_type, dtype=torch.float32):
        if (model_type, dtype) not in made:
            cls = primary_class(model_type)
            path = tmp_path_factory.mktemp(model_type)
            random_model(cls, small_config(model_type, cls)).to(dtype).save_pretrained(path)
            made[model_type, dtype] = path, cls
        return made[model_type, dtype]

    return of


def _loaded_and_saved(cls, source, path, dtype):
    cls.from_pretrained(source, dtype=dtype).save_pretrained(path)
    return load_file(path / "model.safetensors")


def _assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in wanted.items()
    }
    assert all(same_bits(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", KEEPING)
def test_it_is_loading_and_saving(saved, tmp_path, model_type, dtype):
    source, cls = saved(model_type)
    wanted = _loaded_and_saved(cls, source, tmp_path / "plain", dtype)
    hf_stream.convert(source, tmp_path / "ours", dtype=dtype, verify=True)
    _assert_same(load_file(tmp_path / "ours/model.safetensors"), wanted)
    if dtype == torch.float16 and KEEPING[model_type]:
        kept = [name for name, tensor in wanted.items() if tensor.dtype == torch.float32]
        assert any(KEEPING[model_type] in name for name in kept)


def test_what_is_in_half_precision_already_comes_back_to_float32(saved, tmp_path):
    source, cls = saved("deepseek_v3", torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert load_file(source / "model.safetensors")[bias].dtype == torch.bfloat16
    wanted = _loaded_and_saved(cls, source, tmp_path / "plain", torch.bfloat16)
    hf_stream.convert(source, tmp_path / "ours", dtype=torch.bfloat16)
    found = load_file(tmp_path / "ours/model.safetensors")
    _assert_same(found, wanted)
    assert found[bias].dtype == torch.float32


def test_one_file_beside_its_config_and_shards(saved, tmp_path):
    source, cls = saved("t5")
    wanted = _loaded_and_saved(cls, source, tmp_path / "plain", torch.float16)
    hf_stream.convert(source / "model.safetensors", tmp_path / "one.safetensors", dtype=torch.float16)
    _assert_same(load_file(tmp_path / "one.safetensors"), wanted)
    hf_stream.convert(source, tmp_path / "shards", dtype=torch.float16, max_shard_size="100KB")
    _assert_same({name: x.materialize() for name, x in hf_stream.open_checkpoint(tmp_path / "shards").items()}, wanted)
    assert json.loads((tmp_path / "shards/config.json").read_text())["dtype"] == "float16"
    cls.from_pretrained(tmp_path / "shards", dtype="auto")


def test_what_a_layout_makes_of_kept_tensors_is_kept(saved, tmp_path):
    source, cls = saved("t5")
    plain = _loaded_and_saved(cls, source, tmp_path / "plain", torch.float16)
    kept = {name for name, tensor in plain.items() if tensor.dtype == torch.float32}
    block = "encoder.block.0.layer"
    mixed = [f"{block}.1.DenseReluDense.wo.weight", f"{block}.0.SelfAttention.q.weight"]
    layouts = {
        "renamed": Layout([Rename("{rest:+}", "t5.{rest}")]),
        "joined": Layout([Concat([f"{block}.{{n}}.DenseReluDense.wo.weight"], f"{block}.{{n}}.both")]),
        "computed": Layout([Apply("{p:+}.wo.weight", "{p}.doubled", lambda w: w * 2)]),
        "cut": lambda tensors: {"rows": tensors[mixed[0]][:2], "mixed": torch.cat([tensors[n][:1, :8] for n in mixed])},
    }
    for word, layout in layouts.items():
        hf_stream.convert(source, tmp_path / word, layout=layout, dtype=torch.float16)
    found = {word: load_file(tmp_path / word / "model.safetensors") for word in layouts}
    _assert_same({name.removeprefix("t5."): tensor for name, tensor in found["renamed"].items()}, plain)
    for word in ("joined", "computed"):
        assert {tensor.dtype for name, tensor in found[word].items() if name not in plain} == {torch.float32}
        assert all(found[word][name].dtype == plain[name].dtype for name in plain.keys() & found[word].keys())
        assert not kept <= found[word].keys()
    assert {name: tensor.dtype for name, tensor in found["cut"].items()} == {
        "rows": torch.float32,
        "mixed": torch.float16,
    }


def test_tensors_as_the_model_holds_them(saved, tmp_path):
    source, cls = saved("deepseek_v3")
    plain = cls.from_pretrained(source, dtype=torch.bfloat16)
    layout = from_transformers(plain.config)
    hf_stream.convert(source, tmp_path / "held", layout=layout, dtype=torch.bfloat16)
    _assert_same(load_file(tmp_path / "held/model.safetensors"), dict(plain.state_dict()))
    hf_stream.convert(tmp_path / "held", tmp_path / "back", layout=layout.inverse, dtype=torch.float32)
    hf_stream.convert(tmp_path / "back", tmp_path / "again", dtype=torch.bfloat16)
    assert not hf_stream.verify(tmp_path / "again", _loaded_and_saved(cls, source, tmp_path / "p", torch.bfloat16))


def test_types_that_torch_makes_no_models_of_are_for_all(saved, tmp_path):
    source, _ = saved("deepseek_v3")
    hf_stream.convert(source, tmp_path / "out", dtype=torch.float8_e4m3fn)
    assert {x.dtype for x in hf_stream.open_checkpoint(tmp_path / "out").values()} == {torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "unheard_of"}, "does not know the model_type 'unheard_of'"),
        ({"architectures": ["pipeline"]}, "has no model 'pipeline', the architecture"),
        ({"num_layers": "two"}, "does not build it: .*num_layers"),
    ],
)
def test_a_model_that_transformers_does_not_build_is_cast_with_a_warning(saved, tmp_path, caplog, changes, words):
    source, _ = saved("t5")
    (tmp_path / "in").mkdir()
    shutil.copy(source / "model.safetensors", tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps({**config, **changes}))
    hf_stream.convert(tmp_path / "in", tmp_path / "out", dtype=torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {torch.float16}
    [message] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search("become torch.float16, also those that the model may keep in float32.*" + words, message, re.S)


@pytest.mark.parametrize("content", [None, "{}", '{"dim": 3}'])
def test_without_a_config_that_names_a_model_everything_is_cast(saved, tmp_path, caplog, content):
    source, _ = saved("t5")
    (tmp_path / "in").mkdir()
    shutil.copy(source / "model.safetensors", tmp_path / "in")
    if content is not None:
        (tmp_path / "in/config.json").write_text(content)
    hf_stream.convert(tmp_path / "in", tmp_path / "out", dtype=torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {torch.float16}
    assert not caplog.records
