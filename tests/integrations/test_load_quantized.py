"""Quantized models load as in plain transformers: quantized on the way, quantized already, and dequantized."""

from __future__ import annotations

import json
import shutil
import weakref

import gguf
import peft
import pytest
import torch
import transformers
from programs import bits
from same_models import assert_same
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
from transformers import TorchAoConfig
from transformers.integrations.torchao import TorchAoQuantize

import hf_stream
from hf_stream.integrations.transformers import load as streaming_load
from hf_stream.layouts import dequantize_fp8_blocks
from hf_stream.lazy import LazyTensor

AUTO = transformers.AutoModelForCausalLM
TOKENS = torch.arange(12)[None]


def _both(path, **arguments):
    """What plain transformers and hf_stream load, each from the same random seed."""
    for load in (AUTO.from_pretrained, lambda *args, **kwargs: hf_stream.from_pretrained(AUTO, *args, **kwargs)):
        torch.manual_seed(7)
        # Configs of quantization are changed by their use.
        made = {name: make() if callable(make) else make for name, make in arguments.items()}
        yield load(path, **made)


def _logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def _int8():
    return TorchAoConfig(Int8WeightOnlyConfig())


def _int8_experts():
    """Merged experts as well, which are no linear layers."""
    names = (r"re:.*mlp\.experts\.gate_up_proj", r"re:.*self_attn\..*_proj")
    return TorchAoConfig(FqnToConfig({name: Int8WeightOnlyConfig() for name in names}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_weights_quantized_on_the_way(saved, name, dtype):
    plain, ours = _both(saved(name, True), quantization_config=_int8, dtype=dtype)
    assert_same(ours, plain)
    assert bits(_logits(ours)) == bits(_logits(plain))
    assert ours.config.to_dict() == plain.config.to_dict()
    if name != "gpt2":
        assert type(ours.model.layers[0].self_attn.q_proj.weight).__name__ == "Int8Tensor"


def test_merged_experts_quantized_on_the_way(saved):
    plain, ours = _both(saved("qwen3_moe"), quantization_config=_int8_experts)
    assert_same(ours, plain)
    assert type(ours.model.layers[0].mlp.experts.gate_up_proj).__name__ == "Int8Tensor"
    assert type(ours.model.layers[0].mlp.experts.down_proj) is torch.nn.Parameter


def test_a_layout_before_quantization(saved, tmp_path):
    def doubled(tensors):
        return {name: tensor * 2 for name, tensor in tensors.items()}

    hf_stream.save_checkpoint(doubled(hf_stream.open_checkpoint(saved("llama"))), tmp_path)
    shutil.copy(saved("llama") / "config.json", tmp_path)
    plain = AUTO.from_pretrained(tmp_path, quantization_config=_int8())
    assert_same(hf_stream.from_pretrained(AUTO, saved("llama"), quantization_config=_int8(), layout=doubled), plain)


@pytest.mark.parametrize("quantize", [_int8, _int8_experts])
def test_a_checkpoint_of_torchao_and_a_layout_for_it_is_refused(saved, tmp_path, quantize):
    AUTO.from_pretrained(saved("qwen3_moe"), quantization_config=quantize()).save_pretrained(tmp_path)
    plain, ours = _both(tmp_path)
    assert_same(ours, plain)
    if quantize is _int8:  # torchao computes with no such experts
        assert bits(_logits(ours)) == bits(_logits(plain))
    ops = [op for conversion in ours._weight_conversions for op in getattr(conversion, "operations", ())]
    assert ops
    assert not any("convert" in vars(op) for op in ops)
    with pytest.raises(hf_stream.LayoutError, match=r"a checkpoint that torchao has quantized.*hf_stream\.convert"):
        hf_stream.from_pretrained(AUTO, tmp_path, layout=lambda tensors: tensors)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_of_a_quantized_base(saved, tmp_path):
    base = transformers.LlamaForCausalLM.from_pretrained(saved("llama"))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    plain, ours = _both(tmp_path, quantization_config=_int8)
    assert_same(ours, plain)
    assert bits(_logits(ours)) == bits(_logits(plain))


def test_what_a_quantizer_leaves_goes_to_disk_with_the_rest(saved, tmp_path):
    # With a second device torchao wants to quantize on a GPU.
    everything = {"device_map": {"": "disk"}, "offload_folder": tmp_path}
    plain, ours = _both(saved("qwen3_moe"), quantization_config=_int8, **everything)
    assert_same(ours, plain)
    assert ours.model.layers[0].mlp.experts.down_proj.is_meta


def test_a_quantizer_gets_real_tensors_of_one_parameter_at_a_time_and_is_left_as_it_was(saved, monkeypatch):
    given = {}
    quantize = TorchAoQuantize.convert

    def spy(self, input_dict, **kwargs):
        assert not [name for name, tensor in given.items() if tensor() is not None]
        [[tensor]] = input_dict.values()
        assert type(tensor) is torch.Tensor
        given[kwargs["full_layer_name"]] = weakref.ref(tensor)
        return quantize(self, input_dict, **kwargs)

    monkeypatch.setattr(TorchAoQuantize, "convert", spy)
    at_the_end = []
    monkeypatch.setattr(
        streaming_load, "materialize", lambda xs, **kw: at_the_end.extend(xs) or hf_stream.materialize(xs, **kw)
    )
    model = hf_stream.from_pretrained(AUTO, saved("llama"), quantization_config=_int8())
    assert len(given) == 14
    assert {type(tensor) for tensor in at_the_end} == {LazyTensor}
    assert len(at_the_end) == len(list(model.parameters())) - len(given)
    assert "get_quantize_ops" not in vars(model.hf_quantizer)


def _fp8_checkpoint(source, path, block):
    """Every projection in FP8 with a scale per block, in separate shards."""
    tensors, scales = {}, {}
    for name, tensor in hf_stream.open_checkpoint(source).items():
        tensor = tensor.materialize()
        if "_proj.weight" in name:
            blocks = tensor.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
            scale = blocks.abs().amax(dim=(1, 3)) / 448
            tensor = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
            scales[name + "_scale_inv"] = scale
        tensors[name] = tensor
    hf_stream.save_checkpoint({**tensors, **scales}, path, max_shard_size="20KB")
    config = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_fp8_blocks_are_dequantized_and_merged(saved, tmp_path, name, dtype):
    _fp8_checkpoint(saved(name), tmp_path, [8, 16] if name == "llama" else [8, 8])
    settings = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))
    plain, ours = _both(tmp_path, dtype=dtype, quantization_config=lambda: settings)
    assert_same(ours, plain)
    for projection, original in zip(_projections(ours), _projections(AUTO.from_pretrained(saved(name))), strict=True):
        assert projection.dtype == dtype
        torch.testing.assert_close(projection.float(), original, rtol=0.1, atol=0.02)


def _projections(model):
    return [parameter for name, parameter in model.named_parameters() if "_proj" in name]


def test_fp8_blocks_dequantized_by_a_layout(saved, tmp_path):
    _fp8_checkpoint(saved("qwen3_moe"), tmp_path, [8, 8])
    plain = AUTO.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layout = dequantize_fp8_blocks((8, 8))
    assert_same(hf_stream.from_pretrained(AUTO, tmp_path, dtype=torch.bfloat16, layout=layout), plain)


def test_fp8_experts_go_to_their_places_without_being_read_before(saved, tmp_path, monkeypatch):
    _fp8_checkpoint(saved("qwen3_moe"), tmp_path, [8, 8])
    placed = []
    monkeypatch.setattr(
        streaming_load, "materialize", lambda xs, **kw: placed.extend(xs) or hf_stream.materialize(xs, **kw)
    )
    model = hf_stream.from_pretrained(AUTO, tmp_path)
    assert len(placed) == len(list(model.parameters()))


def test_mxfp4_experts_are_dequantized(tmp_path):
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**sizes, **heads, layer_types=["sliding_attention", "full_attention"])
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensor.shape
            blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
            tensors[name + "_blocks"] = blocks
            tensors[name + "_scales"] = torch.randint(118, 130, blocks.shape[:-1], dtype=torch.uint8)
        else:
            tensors[name] = tensor
    hf_stream.save_checkpoint(tensors, tmp_path, max_shard_size="30KB")
    entries = {**config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**entries, "architectures": ["GptOssForCausalLM"]}))
    plain, ours = _both(tmp_path, quantization_config=lambda: transformers.Mxfp4Config(dequantize=True))
    assert_same(ours, plain)
    assert bits(_logits(ours)) == bits(_logits(plain))
    assert ours.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16


def _write_gguf(model, path):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        known = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(f"{known}", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_handed_on_and_refused_with_a_layout(random_model, tmp_path, monkeypatch):
    _write_gguf(random_model("llama"), tmp_path / "tiny.gguf")
    monkeypatch.setattr(streaming_load, "materialize_model", None)
    plain, ours = _both(tmp_path, gguf_file="tiny.gguf")
    assert_same(ours, plain)
    assert torch.equal(ours.lm_head.weight, random_model("llama").lm_head.weight)
    with pytest.raises(hf_stream.LayoutError, match=r"a GGUF file.*hf_stream\.convert"):
        hf_stream.from_pretrained(AUTO, tmp_path, gguf_file="tiny.gguf", layout=lambda tensors: tensors)
