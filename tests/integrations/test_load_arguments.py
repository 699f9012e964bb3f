"""Everything that `from_pretrained` takes does what it does in plain transformers."""

from __future__ import annotations

import json
import shutil
import sys

import huggingface_hub
import peft
import pytest
import torch
import transformers
from programs import bits
from same_models import assert_same
from torch import nn

import hf_stream
from hf_stream.integrations.transformers import load as streaming_load
from hf_stream.layouts import Layout, Rename, packed_gate_up, packed_qkv

AUTO = transformers.AutoModelForCausalLM
TOKENS = torch.arange(12)[None]
ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def _streaming(cls):
    return lambda *args, **kwargs: hf_stream.from_pretrained(cls, *args, **kwargs)


def _both(path, cls=AUTO, **arguments):
    """What plain transformers and hf_stream load, each from the same random seed."""
    for load in (cls.from_pretrained, _streaming(cls)):
        torch.manual_seed(7)
        yield load(path, **arguments)


def _logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def _error(load, *args, **kwargs):
    with pytest.raises(Exception) as raised:
        load(*args, **kwargs)
    return type(raised.value), str(raised.value)


def _assert_same_error(*args, **kwargs):
    plain = _error(AUTO.from_pretrained, *args, **kwargs)
    assert _error(_streaming(AUTO), *args, **kwargs) == plain
    return plain


ARGUMENTS = {
    "dtype_none": {"dtype": None},
    "dtype_string": {"dtype": "float16"},
    "dtype_dict": {"dtype": {"": "bfloat16", "text_config": "float16"}},
    "torch_dtype": {"torch_dtype": torch.bfloat16},
    "device_map_cpu": {"device_map": "cpu"},
    "device_map_device": {"device_map": torch.device("cpu"), "dtype": torch.float16},
    "device_map_dict": {"device_map": {"": "cpu"}},
    "device_map_auto": {"device_map": "auto"},
    "device_map_sequential": {"device_map": "sequential", "max_memory": {"cpu": "1GB"}},
    "device_map_meta": {"device_map": "meta"},
    "attn_eager": {"attn_implementation": "eager"},
    "experts_eager": {"experts_implementation": "eager"},
    "config_attributes": {"output_router_logits": True, "use_cache": False},
    "not_weights_only": {"weights_only": False},
    "no_mmap": {"disable_mmap": True},
    "use_safetensors": {"use_safetensors": True},
    "leftovers": {"low_cpu_mem_usage": True, "_fast_init": True, "mirror": "x", "offload_state_dict": True},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_the_model_is_the_one_that_plain_transformers_gives(saved, arguments):
    plain, ours = _both(saved("qwen3_moe", True), **arguments)
    assert_same(ours, plain)
    assert ours.config.to_dict() == plain.config.to_dict()
    assert ours.config._attn_implementation == plain.config._attn_implementation
    assert getattr(ours, "hf_device_map", None) == getattr(plain, "hf_device_map", None)
    assert not ours.training


@pytest.mark.parametrize("form", ["path", "object", "other_directory"])
def test_a_config_given_by_the_caller(saved, tmp_path, form):
    changed = transformers.AutoConfig.from_pretrained(saved("llama"), rms_norm_eps=0.77)
    changed.save_pretrained(tmp_path)
    config = {"path": tmp_path / "config.json", "object": changed, "other_directory": str(tmp_path)}[form]
    plain, ours = _both(saved("llama"), transformers.LlamaForCausalLM, config=config)
    assert_same(ours, plain)
    assert ours.config.to_dict() == plain.config.to_dict()
    assert ours.config.rms_norm_eps == 0.77


@pytest.mark.parametrize("revision", ["main", "side", "b" * 40])
def test_a_revision_in_the_cache_of_the_hub_without_a_network(random_model, tmp_path, monkeypatch, revision):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--someone--something"
    for number, commit in enumerate(("a" * 40, "b" * 40)):
        model = random_model("qwen3_moe")
        (repo / "blobs").mkdir(parents=True, exist_ok=True)
        state = {name: tensor + number for name, tensor in model.state_dict().items()}
        model.save_pretrained(repo / "snapshots" / commit, state_dict=state, max_shard_size="40KB")
        for file in (repo / "snapshots" / commit).iterdir():
            # As huggingface_hub keeps them: a link to the content.
            blob = repo / "blobs" / f"{number}{file.name}"
            file.rename(blob)
            file.symlink_to(f"../../blobs/{blob.name}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "refs" / "side").write_text("b" * 40)
    plain, ours = _both("someone/something", cache_dir=tmp_path, revision=revision)
    assert_same(ours, plain)
    shift = float(revision != "main")
    assert torch.equal(ours.lm_head.weight, random_model("qwen3_moe").lm_head.weight + shift)


def test_subfolder_variant_and_key_mapping_together(random_model, tmp_path):
    model = random_model("qwen3_moe")
    model.save_pretrained(tmp_path / "inner", variant="half", max_shard_size="40KB")
    for file in (tmp_path / "inner").glob("*.half*.safetensors"):
        tensors = {"old." + name: tensor for name, tensor in hf_stream.open_checkpoint(file).items()}
        shutil.rmtree(tmp_path / "one", ignore_errors=True)
        hf_stream.save_checkpoint(tensors, tmp_path / "one", metadata={"format": "pt"})
        (tmp_path / "one" / "model.safetensors").replace(file)
    index = tmp_path / "inner" / "model.safetensors.index.half.json"
    entries = json.loads(index.read_text())
    entries["weight_map"] = {"old." + name: file for name, file in entries["weight_map"].items()}
    index.write_text(json.dumps(entries))
    arguments = {"subfolder": "inner", "variant": "half", "key_mapping": {r"^old\.": ""}}
    plain, ours = _both(tmp_path, **arguments)
    assert_same(ours, plain)
    assert torch.equal(ours.lm_head.weight, model.lm_head.weight)


def test_what_is_missing_of_merged_experts_is_reported_and_initialised_as_by_transformers(saved, tmp_path):
    tensors = dict(hf_stream.open_checkpoint(saved("qwen3_moe")))
    del tensors["model.layers.1.mlp.experts.5.down_proj.weight"]
    tensors = {name: tensor for name, tensor in tensors.items() if ".layers.1.self_attn" not in name}
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:50]
    hf_stream.save_checkpoint(tensors, tmp_path)
    shutil.copy(saved("qwen3_moe") / "config.json", tmp_path)
    (plain, info), (ours, our_info) = _both(tmp_path, output_loading_info=True, ignore_mismatched_sizes=True)
    assert our_info == info
    assert {name for name, *_ in info["mismatched_keys"]} == {"lm_head.weight", "model.layers.1.mlp.experts.down_proj"}
    assert "model.layers.1.self_attn.q_proj.weight" in info["missing_keys"]
    assert_same(ours, plain)


def test_a_conversion_that_fails_is_reported_as_by_transformers(saved, tmp_path):
    tensors = dict(hf_stream.open_checkpoint(saved("qwen3_moe")))
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    hf_stream.save_checkpoint(tensors, tmp_path)
    shutil.copy(saved("qwen3_moe") / "config.json", tmp_path)
    kind, message = _assert_same_error(tmp_path)
    assert kind is RuntimeError
    assert "CONVERSION" in message


def test_a_path_and_a_state_dict_together_are_refused_as_by_transformers(saved):
    kind, _ = _assert_same_error(saved("llama"), state_dict={"a": torch.zeros(1)})
    assert kind is ValueError


def test_safetensors_are_not_replaced_by_other_files_if_asked_for(random_model, tmp_path):
    random_model("llama").config.save_pretrained(tmp_path)
    torch.save(random_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    kind, _ = _assert_same_error(tmp_path, use_safetensors=True)
    assert kind is OSError


def test_pytorch_files_in_shards_with_entries_that_are_no_tensors(random_model, tmp_path):
    model = random_model("qwen3_moe")
    model.config.save_pretrained(tmp_path)
    state = dict(sorted(model.state_dict().items()))
    names = list(state)
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, part in shards.items():
        torch.save({**{name: state[name] for name in part}, "epoch": 3, "schedule": [1, 2]}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (plain, info), (ours, our_info) = _both(tmp_path, output_loading_info=True, dtype=torch.float16)
    assert_same(ours, plain)
    assert our_info == info
    assert info["unexpected_keys"] == {"epoch", "schedule"}


@pytest.fixture
def offload_indices(monkeypatch):
    """The indices of what lies on disk, of each model that transformers dispatches."""
    seen = []
    dispatch = transformers.modeling_utils.accelerate_dispatch

    def spy(model, quantizer, device_map, folder, index, buffers):
        seen.append(json.loads(json.dumps(index).replace(str(folder), "FOLDER")))
        return dispatch(model, quantizer, device_map, folder, index, buffers)

    monkeypatch.setattr(transformers.modeling_utils, "accelerate_dispatch", spy)
    return seen


def _offloaded(path, folder, **arguments):
    """Both models, with what lies on disk compared: index, files and bytes."""
    models = []
    for number, load in enumerate((AUTO.from_pretrained, _streaming(AUTO))):
        models.append(load(path, offload_folder=folder / str(number), **arguments))
    plain, ours = ({file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in "01")
    assert ours == plain
    return models, plain


OFFLOADS = {
    "dict": {"device_map": ON_DISK},
    "cast": {"device_map": ON_DISK, "dtype": torch.float16},
    "buffers": {"device_map": {**ON_DISK, "model.rotary_emb": "disk"}, "offload_buffers": True},
    "auto": {"device_map": "auto", "max_memory": {"cpu": 60_000}},
    "all": {"device_map": {"": "disk"}},
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("arguments", OFFLOADS.values(), ids=OFFLOADS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
def test_a_model_that_is_partly_on_disk_has_the_same_files_and_index_and_runs(
    saved, tmp_path, offload_indices, name, arguments, sharded
):
    (plain, ours), files = _offloaded(saved(name, sharded), tmp_path, **arguments)
    assert_same(ours, plain)
    assert offload_indices[1] == offload_indices[0]
    assert bits(_logits(ours)) == bits(_logits(plain))
    assert bool(files) is (name != "llama")


def test_pytorch_files_go_to_the_offload_folder(random_model, tmp_path, offload_indices):
    random_model("llama").config.save_pretrained(tmp_path / "model")
    torch.save(random_model("llama").state_dict(), tmp_path / "model" / "pytorch_model.bin")
    (plain, ours), files = _offloaded(tmp_path / "model", tmp_path, device_map=ON_DISK)
    assert_same(ours, plain)
    assert offload_indices[1] == offload_indices[0]
    assert "lm_head.weight.safetensors" in files
    assert bits(_logits(ours)) == bits(_logits(plain))


def test_merged_experts_need_an_offload_folder_as_in_transformers(saved):
    kind, _ = _assert_same_error(saved("qwen3_moe"), device_map=ON_DISK)
    assert kind is ValueError


def test_nothing_is_loaded_only_to_be_offloaded(saved, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("transformers was given a real tensor to save")

    monkeypatch.setattr(transformers.integrations.accelerate, "save_file", refuse)
    load = _streaming(AUTO)
    model = load(saved("qwen3_moe"), device_map=ON_DISK, offload_folder=tmp_path)
    assert transformers.integrations.accelerate.save_file is refuse
    assert model.model.layers[1].mlp.experts.gate_up_proj.is_meta


def test_a_layout_and_offloading_what_it_gives_lies_in_the_offload_folder(saved, random_model, tmp_path):
    llama = random_model("llama")
    layout = packed_qkv(llama.config) | packed_gate_up()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared = {name: getattr(llama.config, name) for name in (*names, "num_key_value_heads", "rms_norm_eps")}
    config = transformers.Phi3Config(**shared, pad_token_id=0, max_position_embeddings=2048)
    phi3 = transformers.Phi3ForCausalLM
    whole = hf_stream.from_pretrained(phi3, saved("llama"), layout=layout, config=config)
    parts = hf_stream.from_pretrained(
        phi3, saved("llama"), layout=layout, config=config, device_map=ON_DISK, offload_folder=tmp_path
    )
    assert bits(_logits(parts)) == bits(_logits(whole))
    assert (tmp_path / "model.layers.1.self_attn.qkv_proj.weight.safetensors").exists()


def test_a_layout_that_keeps_a_name_and_changes_the_tensor_is_not_bypassed_by_the_offload_index(saved, tmp_path):
    def doubled(tensors):
        return {name: tensor * 2 for name, tensor in tensors.items()}

    whole = hf_stream.from_pretrained(AUTO, saved("llama"), layout=doubled)
    parts = hf_stream.from_pretrained(AUTO, saved("llama"), layout=doubled, device_map=ON_DISK, offload_folder=tmp_path)
    assert bits(_logits(parts)) == bits(_logits(whole))


# PEFT still asks for what transformers has renamed.
renamed_in_transformers = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@renamed_in_transformers
def test_an_adapter_s_base_and_its_own_weights_stream(saved, tmp_path, monkeypatch):
    base = transformers.LlamaForCausalLM.from_pretrained(saved("llama"))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(base, config, adapter_name="default").save_pretrained(tmp_path)
    read = []
    monkeypatch.setattr(
        streaming_load, "materialize", lambda xs, **kw: read.append(len(xs)) or hf_stream.materialize(xs, **kw)
    )
    plain, ours = _both(tmp_path)
    assert_same(ours, plain)
    lora = [name for name, _ in ours.named_parameters() if "lora_" in name]
    assert read == [len(list(ours.parameters())) - len(lora), len(lora)]
    assert len(lora) == 8
    assert bits(_logits(ours)) == bits(_logits(plain))


@renamed_in_transformers
def test_a_layout_is_about_the_base_model_not_about_its_adapter(saved, tmp_path):
    path = saved("llama")
    base = transformers.LlamaForCausalLM.from_pretrained(path)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    renamed = {"old." + name: tensor for name, tensor in hf_stream.open_checkpoint(path).items()}
    hf_stream.save_checkpoint(renamed, tmp_path / "base")
    shutil.copy(path / "config.json", tmp_path / "base")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))

    def layout(tensors):
        return {name.removeprefix("old.") if name.startswith("old.") else 1 / 0: t for name, t in tensors.items()}

    ours = hf_stream.from_pretrained(AUTO, tmp_path / "adapter", layout=layout)
    assert bits(_logits(ours)) == bits(_logits(adapted.eval()))


REMOTE_CODE = """
import torch
from transformers import LlamaForCausalLM

class TwiceLlama(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out
"""


def test_code_that_comes_with_the_checkpoint(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    shutil.copytree(saved("llama"), tmp_path / "remote_llama")
    (tmp_path / "remote_llama" / "modeling_twice.py").write_text(REMOTE_CODE)
    config = json.loads((tmp_path / "remote_llama" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_twice.TwiceLlama"}
    (tmp_path / "remote_llama" / "config.json").write_text(json.dumps(config))
    plain, ours = _both(tmp_path / "remote_llama", trust_remote_code=True, dtype=torch.float16)
    assert_same(ours, plain)
    assert type(ours).__name__ == "TwiceLlama"
    assert bits(_logits(ours)) == bits(_logits(plain))


@pytest.mark.parametrize("what", ["a device mesh", "DeepSpeed ZeRO-3"])
def test_sharded_loads_are_handed_on_and_refused_with_a_layout(saved, tmp_path, monkeypatch, what):
    arguments = {}
    if what == "a device mesh":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        arguments = {"device_mesh": torch.distributed.init_device_mesh("cpu", (1,))}
    else:
        monkeypatch.setattr(streaming_load, "is_deepspeed_zero3_enabled", lambda: True)
    monkeypatch.setattr(streaming_load, "materialize_model", None)
    try:
        plain, ours = _both(saved("llama"), **arguments)
        assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
        with pytest.raises(hf_stream.LayoutError, match=rf"{what}.*hf_stream\.convert"):
            hf_stream.from_pretrained(AUTO, saved("llama"), layout=Layout([Rename("a", "b")]), **arguments)
    finally:
        if arguments:
            torch.distributed.destroy_process_group()


class _OwnWay(nn.Module):
    """A class that loads without transformers' loader."""

    @classmethod
    def from_pretrained(cls, path):
        del path
        return cls()


def test_a_layout_that_nobody_used_is_an_error(saved):
    with pytest.raises(hf_stream.LayoutError, match=r"_OwnWay loaded .* did not use the layout"):
        hf_stream.from_pretrained(_OwnWay, saved("llama"), layout=lambda tensors: tensors)
    assert isinstance(hf_stream.from_pretrained(_OwnWay, saved("llama")), _OwnWay)
