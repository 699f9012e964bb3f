"""Every argument of `save_pretrained` gives the files that plain transformers gives, and no others."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file
from saves import assert_same_error, assert_same_files, contents, fresh
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import hf_stream
from hf_stream.integrations.transformers.recorded import Recording, recording
from hf_stream.layouts import Drop, Layout, Rename

SHARD = "12KB"
RENAMED = Layout([Rename("model.{rest:*}", "inner.{rest}")])


class TestWhatIsSaved:
    def test_names_to_be_ignored(self, random_model, tmp_path):
        model = fresh(random_model)
        model._keys_to_ignore_on_save = ["model.norm.weight", "not.there"]
        assert b"model.norm.weight" not in assert_same_files(model, tmp_path)["model.safetensors"]

    def test_tied_weights_once(self, random_model, tmp_path):
        model = fresh(random_model, tie_word_embeddings=True)
        assert b"lm_head" not in assert_same_files(model, tmp_path)["model.safetensors"]

    def test_weights_that_are_shared_but_not_tied(self, random_model, tmp_path):
        model = fresh(random_model)
        model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight
        assert "shared tensors" in assert_same_error(model, tmp_path)

    def test_weights_that_overlap_in_part(self, random_model, tmp_path):
        model = fresh(random_model)
        base = torch.randn(64 + 32, 32)
        model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(base[:32])
        model.model.layers[0].self_attn.o_proj.weight = nn.Parameter(base[16:48])
        assert "shared tensors" in assert_same_error(model, tmp_path)

    def test_a_state_dict_is_left_as_it_is(self, random_model, tmp_path):
        model = fresh(random_model)
        model._keys_to_ignore_on_save = ["model.norm.weight"]
        state_dict = {name: tensor * 2 for name, tensor in model.state_dict().items()}
        before = dict(state_dict)
        hf_stream.save_pretrained(model, tmp_path / "ours", state_dict=state_dict)
        assert list(state_dict) == list(before)
        del before["model.norm.weight"]
        assert not hf_stream.verify(before, tmp_path / "ours")

    def test_a_state_dict_on_disk(self, random_model, saved, tmp_path):
        checkpoint = hf_stream.open_checkpoint(saved("qwen3_moe"))
        assert isinstance(checkpoint, Mapping)
        hf_stream.save_pretrained(
            random_model("qwen3_moe"), tmp_path / "ours", state_dict=checkpoint, save_original_format=False
        )
        assert not hf_stream.verify(saved("qwen3_moe"), tmp_path / "ours")

    def test_a_generation_config_that_was_changed(self, random_model, tmp_path):
        model = fresh(random_model)
        model.generation_config.max_new_tokens = 7
        assert b"max_new_tokens" in assert_same_files(model, tmp_path)["generation_config.json"]

    def test_arguments_of_earlier_versions_mean_what_they_mean_to_transformers(self, random_model, tmp_path):
        assert_same_files(random_model("llama"), tmp_path, safe_serialization=True, save_function=torch.save)


class TestWhere:
    def test_old_shards_go_and_other_weights_stay(self, random_model, tmp_path):
        model = random_model("llama")
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        for name in ("pytorch_model.bin", "model.fp16-00001-of-00001.safetensors", "optimizer.pt"):
            (tmp_path / name).write_bytes(b"of somebody else")
        hf_stream.save_pretrained(model, tmp_path, max_shard_size=SHARD)
        shards = sorted(file.name for file in tmp_path.glob("model-*"))
        assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        assert (tmp_path / "pytorch_model.bin").read_bytes() == b"of somebody else"
        assert (tmp_path / "model.fp16-00001-of-00001.safetensors").exists()
        assert (tmp_path / "optimizer.pt").exists()
        hf_stream.save_pretrained(model, tmp_path)
        assert not list(tmp_path.glob("model-*"))
        assert not (tmp_path / "model.safetensors.index.json").exists()

    def test_weights_that_were_not_saved_in_shards_do_not_outlive_a_save_in_shards(self, random_model, tmp_path):
        hf_stream.save_pretrained(fresh(random_model), tmp_path)
        hf_stream.save_pretrained(random_model("llama"), tmp_path, max_shard_size=SHARD)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        for p, q in zip(loaded.parameters(), random_model("llama").parameters(), strict=True):
            assert torch.equal(p, q)

    def test_without_weights_those_that_are_there_stay(self, random_model, tmp_path):
        hf_stream.save_pretrained(random_model("llama"), tmp_path)
        before = contents(tmp_path)
        hf_stream.save_pretrained(random_model("llama"), tmp_path, state_dict={})
        assert contents(tmp_path) == before

    def test_a_file_is_no_directory(self, random_model, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(hf_stream.CheckpointError, match=r"'.*file' is a file; pass a directory"):
            hf_stream.save_pretrained(random_model("llama"), tmp_path / "file")
        assert contents(tmp_path) == {"file": b"mine"}

    @pytest.mark.parametrize("make", [str, Path], ids=["str", "Path"])
    def test_relative_paths(self, random_model, saved, tmp_path, monkeypatch, make):
        monkeypatch.chdir(tmp_path)
        hf_stream.save_pretrained(random_model("llama"), make("a/b"))
        hf_stream.save_pretrained(random_model("llama"), make("a/b/"))
        assert contents(tmp_path / "a/b") == contents(saved("llama"))
        assert os.listdir(tmp_path / "a") == ["b"]

    @pytest.mark.parametrize("sharded", [False, True])
    def test_onto_the_files_that_plain_transformers_has_mapped(self, saved, tmp_path, sharded):
        source = shutil.copytree(saved("llama", sharded), tmp_path / "model")
        model = transformers.LlamaForCausalLM.from_pretrained(source)
        size = SHARD if sharded else "50GB"
        model.save_pretrained(tmp_path / "plain", max_shard_size=size)
        for _ in range(2):
            hf_stream.save_pretrained(model, source, max_shard_size=size)
            assert contents(source) == contents(tmp_path / "plain")
        with torch.no_grad():
            model.model.norm.weight += 1
        hf_stream.save_pretrained(model, source)
        assert not hf_stream.verify(dict(model.state_dict()), source)


class TestWho:
    @pytest.mark.parametrize("arguments", [{"is_main_process": False}, {}], ids=str)
    def test_only_one_process_of_several_writes(self, random_model, tmp_path, monkeypatch, arguments):
        if not arguments:
            from transformers.distributed import mixin

            monkeypatch.setattr(mixin, "_is_torch_distributed_initialized", lambda: True)
            monkeypatch.setattr(mixin, "_get_torch_distributed_rank", lambda: 1)
        for layout in (None, RENAMED):
            hf_stream.save_pretrained(random_model("llama"), tmp_path / "ours", layout=layout, **arguments)
        assert list(tmp_path.rglob("*")) == [tmp_path / "ours"]

    def test_tensors_that_are_sharded_over_ranks_are_for_transformers(self, random_model, tmp_path, monkeypatch):
        handed = []
        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", lambda *args, **_: handed.append(args))
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            model = fresh(random_model)
            model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
            state_dict = dict(model.state_dict())
        finally:
            torch.distributed.destroy_process_group()
        hf_stream.save_pretrained(model, tmp_path / "ours")
        hf_stream.save_pretrained(random_model("llama"), tmp_path / "ours", state_dict=state_dict)
        hf_stream.save_pretrained(random_model("llama"), tmp_path / "ours", distributed_checkpoint=True)
        assert [args[:2] for args in handed] == [
            (model, tmp_path / "ours"),
            (random_model("llama"), tmp_path / "ours"),
            (random_model("llama"), tmp_path / "ours"),
        ]
        for arguments in ({"state_dict": state_dict}, {"distributed_checkpoint": True}):
            with pytest.raises(hf_stream.LayoutError, match=r"sharded over ranks|a distributed checkpoint"):
                hf_stream.save_pretrained(random_model("llama"), tmp_path / "ours", layout=RENAMED, **arguments)

    def test_other_threads_save_as_ever_meanwhile(self, random_model, saved, tmp_path):
        with recording() as record:
            thread = threading.Thread(target=random_model("llama").save_pretrained, args=(tmp_path / "plain",))
            thread.start()
            thread.join()
        assert record.tensors == {}
        assert contents(tmp_path / "plain") == contents(saved("llama"))

    def test_real_tensors_are_spread_over_files_as_huggingface_hub_does(self):
        base = torch.empty(64, 4)
        tensors = {"a": base[:32], "b": torch.empty(8, 4), "c": base[32:], "d": torch.empty(64, 4)}
        for size in (100, 1024, 1200, 5000):
            arguments = {"filename_pattern": "model{suffix}.safetensors", "max_shard_size": size}
            expected = huggingface_hub.split_torch_state_dict_into_shards(tensors, **arguments)
            assert Recording().split(tensors, **arguments) == expected

    def test_something_else_than_a_model_saves_itself(self, tmp_path):
        class Other:
            def save_pretrained(self, directory, **arguments):
                self.saved = directory, arguments

        other = Other()
        hf_stream.save_pretrained(other, tmp_path, variant="fp16")
        assert other.saved == (tmp_path, {"variant": "fp16"})
        with pytest.raises(hf_stream.LayoutError, match="Other is no model class"):
            hf_stream.save_pretrained(other, tmp_path, layout=RENAMED)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "model.safetensors"),
        ({"variant": "fp16"}, "model.fp16.safetensors"),
        ({"variant": "fp16", "max_shard_size": SHARD}, "model.safetensors.index.fp16.json"),
        ({"save_original_format": False}, "model.safetensors"),
    ],
    ids=str,
)
def test_layouts_go_with_the_other_arguments(random_model, tmp_path, arguments, name):
    model = random_model("qwen3_moe")
    model.save_pretrained(tmp_path / "plain", **arguments)
    hf_stream.save_pretrained(model, tmp_path / "ours", layout=RENAMED, **arguments)
    weights = [file for file in (tmp_path / "plain").iterdir() if "safetensors" in file.name]
    expected = {
        re.sub("^model", "inner", key): value
        for file in weights
        if file.suffix == ".safetensors"
        for key, value in load_file(file).items()
    }
    assert not hf_stream.verify(expected, tmp_path / "ours" / name)


def test_what_a_layout_leaves_is_spread_over_files_anew(random_model, tmp_path):
    layout = Layout([Drop("model.layers.{rest:*}"), Drop("lm_head.weight")])
    hf_stream.save_pretrained(random_model("llama"), tmp_path, layout=layout, max_shard_size="13KB")
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert set(load_file(tmp_path / "model.safetensors")) == {"model.embed_tokens.weight", "model.norm.weight"}
