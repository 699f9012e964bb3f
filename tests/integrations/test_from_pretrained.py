"""`from_pretrained` gives what plain transformers gives, and reads as little."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import transformers
from programs import bits
from safetensors.torch import load_file, save_file
from same_models import assert_same

import hf_stream
from hf_stream.errors import FormatError
from hf_stream.layouts import Drop, Layout, Rename, packed_gate_up, packed_qkv
from hf_stream.lazy import LazyTensor

ARCHITECTURES = ["llama", "qwen3_moe", "gpt2", "opt", "t5", "phi3", "mixtral"]
ARGUMENTS = {
    "as_saved": {},
    "auto": {"dtype": "auto"},
    "float16": {"dtype": torch.float16},
    "bfloat16_on_a_device_map": {"dtype": "bfloat16", "device_map": "cpu"},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_and_buffer_equals_plain_transformers(saved, name, sharded, arguments):
    path = saved(name, sharded)
    cls = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    plain = cls.from_pretrained(path, **ARGUMENTS[arguments])
    assert_same(hf_stream.from_pretrained(cls, path, **ARGUMENTS[arguments]), plain)


@pytest.mark.parametrize("where", ["subfolder", "variant", "bin", "bin_beside_safetensors", "other_names"])
def test_arguments_that_say_which_files_to_read(random_model, tmp_path, where):
    model, arguments = random_model("llama"), {}
    if where == "subfolder":
        model.save_pretrained(tmp_path / "inner")
        arguments = {"subfolder": "inner"}
    elif where == "variant":
        model.save_pretrained(tmp_path, variant="fp16", max_shard_size="12KB")
        arguments = {"variant": "fp16"}
    else:
        model.config.save_pretrained(tmp_path)
        tensors = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        if where == "bin_beside_safetensors":
            model.save_pretrained(tmp_path)
            arguments = {"use_safetensors": False}
        elif where == "other_names":
            renamed = {name.replace("model.", "old."): tensor for name, tensor in tensors.items()}
            save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
            arguments = {"key_mapping": {"^old": "model"}}
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **arguments)
    shifted = where not in ("subfolder", "variant")
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight + shifted)
    assert_same(hf_stream.from_pretrained(transformers.LlamaForCausalLM, tmp_path, **arguments), plain)


def test_missing_unexpected_and_mismatched_keys_are_reported_and_initialised_as_by_transformers(saved, tmp_path):
    path = saved("llama")
    tensors = dict(hf_stream.open_checkpoint(path))
    tensors["nobody.knows.this"] = torch.zeros(3)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(7, 32)
    hf_stream.save_checkpoint(tensors, tmp_path)
    transformers.AutoConfig.from_pretrained(path).save_pretrained(tmp_path)
    loaded = []
    for load in (transformers.LlamaForCausalLM.from_pretrained, _streaming(transformers.LlamaForCausalLM)):
        torch.manual_seed(3)
        loaded.append(load(tmp_path, output_loading_info=True, ignore_mismatched_sizes=True))
    (plain, info), (ours, our_info) = loaded
    assert our_info == info
    assert our_info["missing_keys"] == {"model.layers.1.mlp.up_proj.weight"}
    assert our_info["unexpected_keys"] == {"nobody.knows.this"}
    assert_same(ours, plain)


def _streaming(cls):
    return lambda *args, **kwargs: hf_stream.from_pretrained(cls, *args, **kwargs)


def test_a_mismatch_raises_what_transformers_raises(saved, tmp_path):
    tensors = dict(hf_stream.open_checkpoint(saved("llama")))
    tensors["lm_head.weight"] = torch.zeros(7, 32)
    hf_stream.save_checkpoint(tensors, tmp_path)
    transformers.AutoConfig.from_pretrained(saved("llama")).save_pretrained(tmp_path)
    messages = []
    for load in (transformers.LlamaForCausalLM.from_pretrained, _streaming(transformers.LlamaForCausalLM)):
        with pytest.raises(RuntimeError) as error:
            load(tmp_path)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_a_llama_checkpoint_becomes_a_phi3_model_with_equal_logits_and_goes_back(saved, random_model, tmp_path):
    llama = random_model("llama")
    layout = packed_qkv(llama.config) | packed_gate_up()
    config = transformers.Phi3Config(**_shared(llama.config), pad_token_id=0)
    phi3 = hf_stream.from_pretrained(transformers.Phi3ForCausalLM, saved("llama"), layout=layout, config=config)
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(phi3(tokens).logits, llama(tokens).logits)
    hf_stream.save_pretrained(phi3, tmp_path / "back", layout=layout.inverse)
    assert not hf_stream.verify(saved("llama"), tmp_path / "back")


def _shared(config):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    return {name: getattr(config, name) for name in names}


class PackedLlama(hf_stream.StreamingMixin, transformers.LlamaForCausalLM):
    """A Llama whose attention and MLP are those of Phi-3; the layout depends on its config."""

    @property
    def layout(self):
        return packed_qkv(self.config) | packed_gate_up()

    def __init__(self, config):
        super().__init__(config)
        attention = config._attn_implementation
        phi3 = transformers.Phi3Config(**_shared(config), pad_token_id=0, attn_implementation=attention)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = transformers.models.phi3.modeling_phi3.Phi3Attention(phi3, number)
            layer.mlp = transformers.models.phi3.modeling_phi3.Phi3MLP(phi3)
        self.post_init()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_mixin_class_loads_saves_and_reloads_through_its_layout(saved, tmp_path, sharded):
    path = saved("llama", sharded)
    packed = PackedLlama.from_pretrained(path)
    assert packed.model.layers[1].self_attn.qkv_proj.weight.shape == (64, 32)
    packed.save_pretrained(tmp_path / "original")
    assert not hf_stream.verify(path, tmp_path / "original")
    packed.save_pretrained(tmp_path / "packed", save_original_format=False)
    written = hf_stream.open_checkpoint(tmp_path / "packed")
    assert "model.layers.0.self_attn.qkv_proj.weight" in written
    assert not hf_stream.verify(dict(packed.state_dict()), written)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "original")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens).logits, plain(tokens).logits)


def test_a_mixin_behind_its_model_class_is_refused():
    with pytest.raises(hf_stream.LayoutError, match="Behind: StreamingMixin stands behind the model class"):

        class Behind(transformers.LlamaForCausalLM, hf_stream.StreamingMixin):
            pass


def _without_old(tensors):
    return {name.removeprefix("old."): tensor for name, tensor in tensors.items()}


class Renamed(hf_stream.StreamingMixin, transformers.LlamaForCausalLM):
    """A Llama whose layout is a plain function."""

    layout = _without_old


def test_a_plain_function_as_a_class_s_layout_loads_and_is_refused_for_saving_the_original(saved, tmp_path):
    tensors = {f"old.{name}": tensor for name, tensor in hf_stream.open_checkpoint(saved("llama")).items()}
    hf_stream.save_checkpoint(tensors, tmp_path / "old")
    transformers.AutoConfig.from_pretrained(saved("llama")).save_pretrained(tmp_path / "old")
    model = Renamed.from_pretrained(tmp_path / "old")
    assert not hf_stream.verify(dict(model.state_dict()), saved("llama"))
    with pytest.raises(hf_stream.LayoutError, match="Renamed is a plain function"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    assert not hf_stream.verify(saved("llama"), tmp_path / "new")


def test_a_lazy_state_dict_given_to_plain_from_pretrained_streams_on_load(saved):
    path = saved("qwen3_moe")
    plain = transformers.Qwen3MoeForCausalLM.from_pretrained(path)
    lazies = dict(hf_stream.open_checkpoint(path))
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(None, config=plain.config, state_dict=lazies)
    assert all(isinstance(parameter, LazyTensor) for parameter in model.parameters())
    for name, tensor in hf_stream.materialize(model.state_dict()).items():
        assert bits(tensor) == bits(plain.state_dict()[name]), name


def test_parameters_that_need_no_conversion_alias_the_file_and_writes_to_them_stay_private(saved):
    path = saved("llama")
    before = (path / "model.safetensors").read_bytes()
    model = hf_stream.from_pretrained(transformers.LlamaForCausalLM, path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert (path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_loaded_in_inference_mode_can_be_trained_like_a_plain_one(saved, dtype):
    with torch.inference_mode():
        models = [load(saved("llama"), dtype=dtype) for load in _loaders(transformers.LlamaForCausalLM)]
    ids = torch.arange(8)[None]
    for model in models:
        model(input_ids=ids, labels=ids).loss.backward()
    ours, plain = models
    assert all(bits(p.grad) == bits(q.grad) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))


def _loaders(cls):
    return functools.partial(hf_stream.from_pretrained, cls), cls.from_pretrained


def test_other_threads_load_plainly_while_one_streams(saved):
    path, seen = saved("llama"), []
    rename = Layout([Rename("model.norm.weight", "lost")])

    def plainly():
        _, info = transformers.LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
        seen.append(info["missing_keys"])

    def layout(tensors):
        thread = threading.Thread(target=plainly)
        thread.start()
        thread.join()
        return rename(tensors)

    _, info = hf_stream.from_pretrained(transformers.LlamaForCausalLM, path, layout=layout, output_loading_info=True)
    assert info["missing_keys"] == {"model.norm.weight"}
    assert seen == [set()]


def test_transformers_is_as_before_after_an_error(saved):
    before = transformers.PreTrainedModel._load_pretrained_model
    with pytest.raises(ZeroDivisionError):
        hf_stream.from_pretrained(transformers.LlamaForCausalLM, saved("llama"), layout=lambda _: 1 / 0)
    assert transformers.PreTrainedModel._load_pretrained_model is before


def test_loads_that_overlap_in_any_order_leave_nothing_changed(saved, monkeypatch):
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    plain_load = transformers.PreTrainedModel._load_pretrained_model
    second_is_in, first_is_done = threading.Event(), threading.Event()

    def overlapping(*args, **kwargs):
        if threading.current_thread() is second:
            second_is_in.set()
            assert first_is_done.wait(60)
        else:
            second.start()
            assert second_is_in.wait(60)
        return plain_load(*args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", staticmethod(overlapping))
    load = _streaming(transformers.LlamaForCausalLM)
    second = threading.Thread(target=load, args=[saved("llama")])
    load(saved("llama"))
    first_is_done.set()
    second.join()
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    assert transformers.utils.logging.set_tqdm_hook(None) is None
    assert transformers.PreTrainedModel._load_pretrained_model is overlapping


def test_of_a_name_in_two_files_the_last_counts_as_in_transformers(saved, tmp_path):
    shutil.copytree(saved("llama", sharded=True), tmp_path / "model")
    first, *_, last = sorted((tmp_path / "model").glob("*.safetensors"))
    (name, tensor), *_ = load_file(first).items()
    save_file({**load_file(last), name: tensor + 1}, last, {"format": "pt"})
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert_same(hf_stream.from_pretrained(transformers.LlamaForCausalLM, tmp_path / "model"), plain)


def test_files_are_not_mapped_if_transformers_is_told_not_to(saved):
    path = saved("llama")
    mapped, read = (_streaming(transformers.LlamaForCausalLM)(path, disable_mmap=disable) for disable in (False, True))
    assert_same(read, mapped)
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in maps
        if line.endswith("/model.safetensors")
    ]
    for model, inside in ((mapped, True), (read, False)):
        address = model.lm_head.weight.data_ptr()
        assert any(start <= address < stop for start, stop in ranges) is inside


class _Touch:
    """When unpickled, makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_pickle_is_executed_whatever_the_caller_says(saved, tmp_path):
    transformers.AutoConfig.from_pretrained(saved("llama")).save_pretrained(tmp_path)
    torch.save({"x": _Touch(tmp_path / "touched")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        FormatError, match=r"'x' is an object made by 'builtins\.getattr'.* Nothing was looked up or run"
    ):
        hf_stream.from_pretrained(transformers.LlamaForCausalLM, tmp_path, weights_only=False)
    assert not (tmp_path / "touched").exists()


def test_a_state_dict_of_real_tensors_is_shared_not_copied_as_in_transformers(random_model):
    tensors = {name: tensor.clone() for name, tensor in random_model("llama").state_dict().items()}
    config = random_model("llama").config
    model = hf_stream.from_pretrained(transformers.LlamaForCausalLM, None, config=config, state_dict=tensors)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == tensors[name].data_ptr()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2", "mixtral"])
def test_every_byte_of_what_is_kept_is_read_once_and_of_what_is_dropped_never(saved, counting_file, monkeypatch, name):
    opened = []
    counted = lambda path: opened.append(counting_file(path)) or opened[-1]  # noqa: E731
    monkeypatch.setattr("hf_stream.checkpoint.weight_files.FileStorage", counted)
    layout = Layout([Drop("{model:*}.layers.1.{rest:+}")]) if name != "gpt2" else None
    # A cast of everything: nothing is left as a mapping of the file, whose reads nobody could count.
    hf_stream.from_pretrained(transformers.AutoModelForCausalLM, saved(name, True), layout=layout, dtype=torch.float64)
    headers = hf_stream.open_checkpoint(saved(name, True)).headers
    for file in opened[: len(headers)]:
        for tensor, info in headers[Path(file.name).name].tensors.items():
            times = 0 if layout is not None and ".layers.1." in tensor else 1
            assert (file.read_counts[info.start : info.stop] == times).all(), tensor


def test_a_layout_that_returns_nothing_is_refused_in_words(saved):
    with pytest.raises(hf_stream.LayoutError, match="must return a mapping of names to tensors, got None"):
        hf_stream.from_pretrained(transformers.LlamaForCausalLM, saved("llama"), layout=lambda tensors: None)
