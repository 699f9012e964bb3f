"""Adapters, offloaded, quantised and user-written models, and classes with a way of their own, are saved alike."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import textwrap

import accelerate
import pytest
import torch
import transformers
from architectures import primary_class, small_config
from architectures import random_model as random_model_of
from peft import LoraConfig
from safetensors.torch import load_file
from saves import assert_same_error, assert_same_files, contents, fresh
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig

import hf_stream
from hf_stream.layouts import Layout, Rename, packed_gate_up

SHARD = "12KB"
RENAMED = Layout([Rename("model.{rest:*}", "inner.{rest}")])
PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class TestAdapters:
    @pytest.fixture
    def model(self, random_model):
        model = fresh(random_model)
        torch.manual_seed(1)
        targets = ["q_proj", "down_proj"]
        model.add_adapter(LoraConfig(target_modules=targets, r=2, init_lora_weights=False, modules_to_save=["norm"]))
        return model

    @pytest.mark.parametrize(
        "arguments",
        [{}, {"save_peft_format": False}, {"max_shard_size": "1KB"}, {"variant": "fp16"}],
        ids=str,
    )
    def test_only_the_adapter_is_saved(self, model, tmp_path, passed_whole, arguments):
        plain = assert_same_files(model, tmp_path, **arguments)
        assert "adapter_config.json" in plain
        assert not {"config.json", "model.safetensors"} & plain.keys()
        loaded = hf_stream.open_checkpoint(next((tmp_path / "ours").glob("adapter_model*")))
        prefix = "base_model.model." if arguments.get("save_peft_format", True) else "model.layers"
        assert all(name.startswith(prefix) for name in loaded if "norm" not in name)
        passed_whole.clear()
        hf_stream.save_pretrained(model, tmp_path / "again", **arguments)
        assert passed_whole == []

    @pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
    def test_one_of_several(self, random_model, tmp_path):
        model = fresh(random_model)
        for name, rank in (("first", 2), ("second", 4)):
            model.add_adapter(LoraConfig(target_modules=["q_proj"], r=rank, init_lora_weights=False), name)
        model.set_adapter("first")
        assert_same_files(model, tmp_path)
        ranks = {tensor.shape for name, tensor in load_file(tmp_path / "ours/adapter_model.safetensors").items()}
        assert ranks == {(2, 32), (32, 2)}
        model.set_adapter(["first", "second"])
        assert "Multiple active adapters" in assert_same_error(model, tmp_path / "two")

    def test_the_model_in_the_directory_is_left_alone(self, random_model, model, tmp_path):
        hf_stream.save_pretrained(random_model("llama"), tmp_path, max_shard_size=SHARD)
        before = contents(tmp_path)
        assert len(before) > 4
        hf_stream.save_pretrained(model, tmp_path)
        after = contents(tmp_path)
        assert {name: after[name] for name in before} == before
        assert after.keys() - before.keys() == {"adapter_config.json", "adapter_model.safetensors"}

    def test_an_adapter_takes_the_place_of_an_older_one_in_shards(self, model, tmp_path):
        hf_stream.save_pretrained(model, tmp_path, max_shard_size="1KB")
        assert len(list(tmp_path.glob("adapter_model-*"))) > 1
        hf_stream.save_pretrained(model, tmp_path)
        assert [file.name for file in tmp_path.glob("adapter_model*")] == ["adapter_model.safetensors"]

    def test_a_layout_is_refused_and_a_class_s_own_is_not_for_adapters(self, model, saved, tmp_path):
        with pytest.raises(hf_stream.LayoutError, match="adapters"):
            hf_stream.save_pretrained(model, tmp_path / "refused", layout=RENAMED)
        assert list(tmp_path.iterdir()) == []

        class Packed(hf_stream.StreamingMixin, transformers.LlamaForCausalLM):
            layout = RENAMED.inverse | RENAMED

        streaming = Packed.from_pretrained(saved("llama"))
        streaming.add_adapter(LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
        streaming.save_pretrained(tmp_path / "ours")
        transformers.PreTrainedModel.save_pretrained(streaming, tmp_path / "plain")
        assert contents(tmp_path / "ours") == contents(tmp_path / "plain")

    @pytest.mark.filterwarnings("ignore:Could not find a config file")
    def test_a_class_that_saves_adapter_and_model(self, tmp_path):
        config = transformers.GraniteSpeechConfig(
            text_config={"model_type": "granite", **SMALL},
            encoder_config={"num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "input_dim": 16},
            projector_config={
                "model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "intermediate_size": 16, "encoder_hidden_size": 16,
            },
            has_lora_adapter=True,
        )  # fmt: skip
        model = transformers.GraniteSpeechForConditionalGeneration(config)
        model.add_adapter(LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
        adapter = {}
        for name, save in (("plain", type(model).save_pretrained), ("ours", hf_stream.save_pretrained)):
            save(model, str(tmp_path / name))
            adapter[name] = json.loads((tmp_path / name / "adapter_config.json").read_text())
            (tmp_path / name / "adapter_config.json").unlink()
        # It names the directory.
        assert adapter["ours"].pop("base_model_name_or_path") == str(tmp_path / "ours")
        assert adapter["plain"].pop("base_model_name_or_path") == str(tmp_path / "plain")
        assert adapter["ours"] == adapter["plain"]
        plain = contents(tmp_path / "plain")
        assert {"model.safetensors", "adapter_model.safetensors"} <= plain.keys()
        assert contents(tmp_path / "ours") == plain


@pytest.fixture
def few_files():
    """Only a few more files can be open than are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class TestOffloaded:
    @pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
    @pytest.mark.parametrize("arguments", [{}, {"max_shard_size": SHARD}, {"save_original_format": False}], ids=str)
    @pytest.mark.parametrize("name", ["llama", "qwen3_moe", "t5"])
    def test_files_equal_plain_transformers_and_nothing_is_brought_back_for_them(
        self, saved, tmp_path, monkeypatch, name, arguments
    ):
        auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
        places = {"shared": "cpu", "encoder": "disk", "decoder": "cpu", "lm_head": "cpu"} if name == "t5" else PLACES
        model = auto.from_pretrained(saved(name, True), device_map=places, offload_folder=tmp_path / "offloaded")
        assert any(parameter.is_meta for parameter in model.parameters())
        model.save_pretrained(tmp_path / "plain", **arguments)

        def brought_back(weights, key):
            raise AssertionError(f"'{key}' was loaded whole")

        monkeypatch.setattr(accelerate.utils.offload.OffloadedWeightsLoader, "__getitem__", brought_back)
        hf_stream.save_pretrained(model, tmp_path / "ours", **arguments)
        assert contents(tmp_path / "ours") == contents(tmp_path / "plain")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("offload", [accelerate.cpu_offload, accelerate.disk_offload])
    @pytest.mark.parametrize("whole", [[], ["LlamaDecoderLayer"]], ids=["modules", "layers"])
    def test_models_that_accelerate_itself_has_offloaded(
        self, random_model, tmp_path, few_files, offload, dtype, whole
    ):
        model = fresh(random_model).to(dtype)
        model.save_pretrained(tmp_path / "expected", max_shard_size=SHARD)
        where = {"offload_dir": tmp_path / "offloaded"} if offload is accelerate.disk_offload else {}
        offload(model, execution_device=torch.device("cpu"), preload_module_classes=whole, **where)
        assert all(parameter.is_meta for parameter in model.parameters())
        hf_stream.save_pretrained(model, tmp_path / "ours", max_shard_size=SHARD)
        assert contents(tmp_path / "ours") == contents(tmp_path / "expected")

    @pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
    def test_weights_on_disk_in_another_dtype_than_the_model_s(self, saved, tmp_path):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            saved("llama"), dtype=torch.bfloat16, device_map=PLACES, offload_folder=tmp_path / "offloaded"
        )
        assert b"F32" not in assert_same_files(model, tmp_path)["model.safetensors"]

    @pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
    def test_onto_the_files_that_hold_the_weights(self, saved, tmp_path):
        source = shutil.copytree(saved("llama", True), tmp_path / "model")
        expected = {key: value for file in source.glob("*.safetensors") for key, value in load_file(file).items()}
        model = transformers.AutoModelForCausalLM.from_pretrained(source, device_map=PLACES, offload_folder=tmp_path)
        hf_stream.save_pretrained(model, source)
        assert [file.name for file in source.glob("model*")] == ["model.safetensors"]
        assert not hf_stream.verify(expected, source)

    @pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
    @pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
    def test_through_a_layout(self, random_model, saved, tmp_path, name):
        layout = RENAMED | packed_gate_up() if name == "llama" else RENAMED
        hf_stream.save_pretrained(random_model(name), tmp_path / "expected", layout=layout, max_shard_size=SHARD)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            saved(name), device_map=PLACES, offload_folder=tmp_path / "offloaded"
        )
        hf_stream.save_pretrained(model, tmp_path / "ours", layout=layout, max_shard_size=SHARD)
        assert not hf_stream.verify(tmp_path / "expected", tmp_path / "ours")
        assert any("inner." in name for name in hf_stream.open_checkpoint(tmp_path / "ours"))

    def test_weights_that_are_nowhere_are_named(self, random_model, tmp_path):
        model = fresh(random_model)
        model.lm_head.weight = nn.Parameter(torch.empty(96, 32, device="meta"))
        with pytest.raises(hf_stream.CheckpointError, match=r"'lm_head\.weight' is on the meta device"):
            hf_stream.save_pretrained(model, tmp_path / "ours")
        assert list(tmp_path.iterdir()) == []


class TestQuantized:
    @pytest.mark.parametrize("arguments", [{}, {"max_shard_size": SHARD}], ids=str)
    def test_tensors_and_metadata_equal_plain_transformers(self, saved, tmp_path, arguments):
        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
        model = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"), quantization_config=config)
        model.save_pretrained(tmp_path / "plain", **arguments)
        hf_stream.save_pretrained(model, tmp_path / "ours", **arguments)
        plain, ours = contents(tmp_path / "plain"), contents(tmp_path / "ours")
        assert plain.keys() == ours.keys()
        for name, content in plain.items():
            # The library writes several entries of metadata in random order.
            assert _parsed(ours[name], name) == _parsed(content, name)
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(reloaded.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
        with pytest.raises(hf_stream.LayoutError, match="a quantized model"):
            hf_stream.save_pretrained(model, tmp_path / "refused", layout=RENAMED)
        assert not (tmp_path / "refused").exists()

    def test_conversions_of_a_quantizer_get_real_tensors(self, saved, tmp_path, monkeypatch):
        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
        model = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"), quantization_config=config)
        kinds = set()

        def revert(model, state_dict):
            kinds.update(map(type, state_dict.values()))
            return state_dict

        monkeypatch.setattr(transformers.modeling_utils, "revert_weight_conversion", revert)
        hf_stream.save_pretrained(model, tmp_path / "ours")
        assert kinds == {torch.Tensor}

    def test_what_cannot_be_saved_is_refused_by_transformers(self, saved, tmp_path, monkeypatch):
        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
        model = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"), quantization_config=config)
        monkeypatch.setattr(type(model.hf_quantizer), "is_serializable", lambda _: False)
        assert "not serializable" in assert_same_error(model, tmp_path)


def _parsed(content: bytes, name: str):
    if not name.endswith(".safetensors"):
        return content
    start = 8 + int.from_bytes(content[:8], "little")
    return start, json.loads(content[8:start]), content[start:]


class TestClassesOfOnesOwn:
    def test_code_goes_along(self, tmp_path, monkeypatch):
        code = """
            from transformers import LlamaConfig, LlamaForCausalLM
            from .parts_of_mine import VALUE

            class MyConfig(LlamaConfig):
                model_type = "my-llama"

            class MyModel(LlamaForCausalLM):
                config_class = MyConfig
        """
        package = tmp_path / "my_package"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "parts_of_mine.py").write_text("VALUE = 1\n")
        (package / "modeling_mine.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(tmp_path)
        from my_package.modeling_mine import MyConfig, MyModel

        MyConfig.register_for_auto_class()
        MyModel.register_for_auto_class("AutoModelForCausalLM")
        model = MyModel(MyConfig(**SMALL))
        plain = assert_same_files(model, tmp_path)
        assert {"modeling_mine.py", "parts_of_mine.py"} <= plain.keys()
        assert b"AutoModelForCausalLM" in plain["config.json"]
        for name in [name for name in sys.modules if name.startswith("my_package")]:
            del sys.modules[name]

    def test_code_of_a_loaded_model_is_saved_again(self, saved, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        source = shutil.copytree(saved("llama"), tmp_path / "remote_mine")
        config = json.loads((source / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MyLlama"}
        (source / "config.json").write_text(json.dumps(config))
        (source / "modeling_mine.py").write_text(
            "import transformers\nclass MyLlama(transformers.LlamaForCausalLM):\n    pass\n"
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        assert "modeling_mine.py" in assert_same_files(model, tmp_path)

    @pytest.mark.parametrize("model_type", ["csm", "kyutai_speech_to_text", "jev"])
    def test_classes_of_transformers_with_a_save_pretrained_of_their_own(self, tmp_path, model_type, passed_whole):
        cls = primary_class(model_type)
        model = random_model_of(cls, small_config(model_type, cls))
        hf_stream.save_pretrained(model, tmp_path / "ours")
        assert passed_whole == []
        model.save_pretrained(tmp_path / "plain")
        assert passed_whole != []
        assert contents(tmp_path / "ours") == contents(tmp_path / "plain")
