"""hf_stream's Auto classes are transformers' own, and stream on load and on save."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import pkgutil
import subprocess
import sys
import weakref
from pathlib import Path

import peft
import pytest
import torch
import transformers
from same_models import assert_same
from transformers.models.auto.auto_factory import _BaseAutoModelClass

import hf_stream
from hf_stream.layouts import Layout, Rename, packed_gate_up, packed_qkv


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def auto_of(library, name: str):
    return library.AutoModelForSeq2SeqLM if name == "t5" else library.AutoModelForCausalLM


def test_every_auto_class_of_a_model_is_there_under_its_name_and_the_others_are_transformers_own():
    plain = {name: getattr(transformers, name) for name in dir(transformers.models.auto) if name.startswith("Auto")}
    of_models = {name for name, cls in plain.items() if issubclass(cls, _BaseAutoModelClass)}
    assert len(of_models) > 40
    assert {"AutoTokenizer", "AutoConfig", "AutoProcessor"} <= plain.keys() - of_models
    assert plain.keys() <= set(dir(hf_stream))
    for name, cls in plain.items():
        ours = getattr(hf_stream, name)
        assert ours is getattr(hf_stream, name)
        if name in of_models:
            assert ours is not cls
            assert issubclass(ours, cls)
            assert (ours.__name__, ours._model_mapping) == (name, cls._model_mapping)
            assert pickle.loads(pickle.dumps(ours)) is ours
        else:
            assert ours is cls


@pytest.mark.parametrize("name", ["NoSuch", "AutoModelForNothing", "AutoformerModel", "LlamaForCausalLM"])
def test_other_names_are_an_import_error(name):
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'hf_stream'"):
        exec(f"from hf_stream import {name}")
    with pytest.raises(AttributeError, match=f"module 'hf_stream' has no attribute '{name}'"):
        getattr(hf_stream, name)


def test_transformers_is_not_imported_before_a_name_of_it_is_used():
    program = """
import sys, hf_stream
hf_stream.open_checkpoint, hf_stream.__all__
assert not hasattr(hf_stream, "NoSuch")
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2", "t5"])
def test_what_is_loaded_and_what_it_saves_equal_plain_transformers_and_neither_passes_whole(
    saved, tmp_path, passed_whole, name
):
    ours = auto_of(hf_stream, name).from_pretrained(saved(name, True), dtype="auto")
    ours.save_pretrained(tmp_path / "ours", max_shard_size="1GB")
    assert passed_whole == []
    plain = auto_of(transformers, name).from_pretrained(saved(name, True), dtype="auto")
    plain.save_pretrained(tmp_path / "plain", max_shard_size="1GB")
    assert passed_whole
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")
    assert ours.config.architectures == [type(plain).__name__]
    assert_same(ours, plain)
    assert_same(auto_of(transformers, name).from_pretrained(tmp_path / "ours"), plain)


def test_arguments_of_the_plain_class_work_and_what_it_returns_is_returned(saved, tmp_path, passed_whole):
    config = transformers.AutoConfig.from_pretrained(saved("llama"))
    arguments = {"config": config, "dtype": torch.bfloat16, "output_loading_info": True, "device_map": "cpu"}
    model, info = hf_stream.AutoModel.from_pretrained(saved("llama"), **arguments)
    plain, plain_info = transformers.AutoModel.from_pretrained(saved("llama"), **arguments)
    assert_same(model, plain)
    assert info == plain_info
    passed_whole.clear()
    model.save_pretrained(tmp_path)
    assert passed_whole == []
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        hf_stream.AutoModelForSeq2SeqLM.from_pretrained(saved("llama"))


class Counts:
    total = 0

    def update(self, nbytes):
        self.total += nbytes


def test_buffer_size_and_progress_are_those_of_the_call(saved, tmp_path, monkeypatch):
    sizes = []
    for module, function in (("load", "materialize"), ("save", "write_files")):
        target = f"hf_stream.integrations.transformers.{module}.{function}"
        monkeypatch.setattr(target, _noting(sizes, pkgutil.resolve_name(target)))
    loading, saving = Counts(), Counts()
    arguments = {"dtype": torch.float64, "buffer_size": 1001, "progress": loading}
    model = hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama"), **arguments)
    model.save_pretrained(tmp_path, buffer_size=1002, progress=saving)
    model.save_pretrained(tmp_path, progress=False)
    assert sizes == [1001, 1002, 64 << 20]
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert saving.total == nbytes
    assert loading.total > 0


def _noting(sizes, function):
    @functools.wraps(function)
    def noting(*args, **kwargs):
        sizes.append(kwargs["buffer_size"])
        return function(*args, **kwargs)

    return noting


def test_a_layout_leads_in_and_back_out(saved, tmp_path, passed_whole):
    config = transformers.AutoConfig.from_pretrained(saved("llama"))
    layout = packed_qkv(config) | packed_gate_up()
    phi3 = transformers.Phi3Config(**{k: v for k, v in config.to_dict().items() if k in SHARED}, pad_token_id=0)
    model = hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama"), config=phi3, layout=layout)
    assert isinstance(model, transformers.Phi3ForCausalLM)
    assert model.model.layers[0].self_attn.qkv_proj.weight.shape == (64, 32)
    model.save_pretrained(tmp_path / "back")
    assert not hf_stream.verify(tmp_path / "back", saved("llama"))
    model.save_pretrained(tmp_path / "held", save_original_format=False)
    assert not hf_stream.verify(tmp_path / "held", dict(model.state_dict()))
    # What a call asks for itself counts more than what the model remembers.
    hf_stream.save_pretrained(model, tmp_path / "asked", layout=Layout([Rename("lm_head.weight", "head")]))
    assert "head" in hf_stream.open_checkpoint(tmp_path / "asked")
    assert passed_whole == []
    hf_stream.save_pretrained(model, tmp_path / "known")
    assert contents(tmp_path / "known") == contents(tmp_path / "back")


SHARED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
]


def _renamed(tensors):
    return {name.removeprefix("old."): tensor for name, tensor in tensors.items()}


def test_a_plain_function_as_layout_loads_and_is_refused_for_saving_the_original(saved, tmp_path):
    model = hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama"), layout=_renamed)
    with pytest.raises(hf_stream.LayoutError, match="the layout of LlamaForCausalLM is a plain function"):
        model.save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    model.save_pretrained(tmp_path / "held", save_original_format=False)
    assert not hf_stream.verify(tmp_path / "held", saved("llama"))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


RENAMED = Layout([Rename("model.norm.weight", "model.final.weight")])


@pytest.mark.parametrize("change", [copy.deepcopy, copy.copy, pickled, torch_saved, lambda model: model.to("cpu")])
def test_copies_and_pickles_save_their_own_tensors_streaming_through_the_layout(saved, tmp_path, passed_whole, change):
    original = hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=torch.float32)
    original.save_pretrained(tmp_path / "plain")
    hf_stream.convert(tmp_path / "plain", tmp_path / "renamed", layout=RENAMED)
    original = hf_stream.AutoModelForCausalLM.from_pretrained(tmp_path / "renamed", layout=RENAMED.inverse)
    model = change(original)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(tmp_path / "ours")
    assert passed_whole == []
    expected = {**RENAMED(model.state_dict())}
    assert not hf_stream.verify(tmp_path / "ours", expected)


def test_a_copy_and_a_pickle_outlive_the_model_they_were_made_of(saved, tmp_path):
    model = hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama"))
    for number, change in enumerate((copy.deepcopy, pickled)):
        model = change(model)
        gc.collect()
        model.save_pretrained(tmp_path / str(number))
        assert not hf_stream.verify(tmp_path / str(number), saved("llama"))


def test_other_models_stay_plain_and_transformers_is_as_it_was_when_the_last_streaming_one_is_gone(
    saved, tmp_path, passed_whole
):
    gc.collect()
    before = vars(transformers.PreTrainedModel)["save_pretrained"]
    model = hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama"))
    copied = copy.deepcopy(model)
    del model
    assert vars(transformers.PreTrainedModel)["save_pretrained"] is not before
    assert passed_whole == []
    plain = transformers.LlamaForCausalLM.from_pretrained(saved("llama"), dtype=torch.float64)
    assert len(passed_whole) == 21
    plain.save_pretrained(tmp_path)
    assert len(passed_whole) == 42
    del copied
    assert vars(transformers.PreTrainedModel)["save_pretrained"] is before


def test_a_model_is_freed_with_its_last_reference_as_in_transformers(saved):
    alive = []
    gc.collect()
    gc.disable()
    try:
        for library in (transformers, hf_stream):
            model = library.AutoModelForCausalLM.from_pretrained(saved("llama"))
            reference = weakref.ref(model)
            del model
            alive.append(reference() is not None)
    finally:
        gc.enable()
    assert alive == [False, False]


def test_a_compiled_model_saves_streaming(saved, tmp_path, passed_whole):
    model = torch.compile(hf_stream.AutoModelForCausalLM.from_pretrained(saved("llama")), backend="eager")
    model.save_pretrained(tmp_path)
    assert passed_whole == []
    assert not hf_stream.verify(tmp_path, saved("llama"))


# peft asks for what transformers calls by a new name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_model_wrapped_and_merged_by_peft_saves_streaming(saved, tmp_path, passed_whole):
    def merged(library):
        torch.manual_seed(0)
        model = library.AutoModelForCausalLM.from_pretrained(saved("llama"))
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config).merge_and_unload()

    merged(hf_stream).save_pretrained(tmp_path / "ours")
    assert passed_whole == []
    merged(transformers).save_pretrained(tmp_path / "plain")
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


def test_a_model_made_from_a_config_saves_streaming(saved, tmp_path, passed_whole):
    config = transformers.AutoConfig.from_pretrained(saved("qwen3_moe"))
    models = []
    for library in (hf_stream, transformers):
        torch.manual_seed(0)
        models.append(library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    assert_same(*models)
    models[0].save_pretrained(tmp_path / "ours")
    assert passed_whole == []
    models[1].save_pretrained(tmp_path / "plain")
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


class OwnConfig(transformers.LlamaConfig):
    model_type = "hf_stream_test_own"


class OwnModel(hf_stream.StreamingMixin, transformers.LlamaForCausalLM):
    config_class = OwnConfig
    layout = RENAMED.inverse


@pytest.fixture
def registered():
    hf_stream.AutoConfig.register(OwnConfig.model_type, OwnConfig)
    hf_stream.AutoModelForCausalLM.register(OwnConfig, OwnModel)
    yield
    del transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content[OwnConfig.model_type]
    del transformers.AutoModelForCausalLM._model_mapping._extra_content[OwnConfig]


@pytest.mark.usefixtures("registered")
def test_a_registered_class_with_a_layout_of_its_own_is_found_and_keeps_it(saved, tmp_path):
    llama = transformers.AutoConfig.from_pretrained(saved("llama"))
    OwnConfig(**{k: v for k, v in llama.to_dict().items() if k in SHARED}).save_pretrained(tmp_path / "own")
    hf_stream.convert(saved("llama") / "model.safetensors", tmp_path / "own", layout=RENAMED)
    for library in (hf_stream, transformers):
        model = library.AutoModelForCausalLM.from_pretrained(tmp_path / "own")
        assert type(model) is OwnModel
        model.save_pretrained(tmp_path / "back")
        assert not hf_stream.verify(tmp_path / "back", tmp_path / "own")


@pytest.mark.usefixtures("registered")
def test_a_layout_given_counts_more_than_that_of_the_class_both_ways(saved, tmp_path):
    llama = transformers.AutoConfig.from_pretrained(saved("llama"))
    OwnConfig(**{k: v for k, v in llama.to_dict().items() if k in SHARED}).save_pretrained(tmp_path / "other")
    other = Layout([Rename("model.norm.weight", "other")])
    hf_stream.convert(saved("llama") / "model.safetensors", tmp_path / "other", layout=other)
    model = hf_stream.AutoModelForCausalLM.from_pretrained(tmp_path / "other", layout=other.inverse)
    model.save_pretrained(tmp_path / "back")
    assert not hf_stream.verify(tmp_path / "back", tmp_path / "other")


class Counted(transformers.LlamaForCausalLM):
    saves = 0

    def save_pretrained(self, save_directory, *args, **kwargs):
        self.saves += 1
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / "extra.txt").write_text(str(save_directory))


def test_a_class_that_overrides_save_pretrained_does_so_once_and_in_the_right_place(saved, tmp_path, passed_whole):
    model = Counted.from_pretrained(saved("llama"))
    passed_whole.clear()
    for save in (functools.partial(hf_stream.save_pretrained, model), model.save_pretrained):
        model.saves = 0
        save(tmp_path / "out")
        assert model.saves == 1
        assert (tmp_path / "out/extra.txt").read_text() == str(tmp_path / "out")
        assert not hf_stream.verify(tmp_path / "out", saved("llama"))
        assert bool(passed_whole) is (save == model.save_pretrained)
