"""Merged adapters: the files of peft's merge_and_unload, bit for bit, and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import same_bits
from torch import nn

import hf_stream
from hf_stream.layouts import from_transformers, merge_lora
from hf_stream.lazy import LazyTensor, working_set

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LLAMA = (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES))
TIED = (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
GPT2 = (transformers.GPT2LMHeadModel, transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4))
BERT = (
    transformers.BertForSequenceClassification,
    transformers.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
)
T5 = (
    transformers.T5ForConditionalGeneration,
    transformers.T5Config(vocab_size=96, d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8),
)
RESNET = (
    transformers.ResNetForImageClassification,
    transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
)
WHISPER = (
    transformers.WhisperModel,
    transformers.WhisperConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=20,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
)  # fmt: skip
QWEN3_MOE = (
    transformers.Qwen3MoeForCausalLM,
    transformers.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=24, num_experts_per_tok=2, head_dim=8),
)
GPT_OSS = (transformers.GptOssForCausalLM, transformers.GptOssConfig(**SIZES, num_local_experts=4, head_dim=8))

# What peft says of its options, and transformers of how peft uses it.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "RuntimeWarning", "FutureWarning")
]

Model = tuple[type, transformers.PreTrainedConfig]


def prepare(
    directory: Path, model: Model, dtype: torch.dtype = torch.float32, base_class: type | None = None, **options: Any
) -> Path:
    """A random base model in `base`, and a random adapter of it in `adapter`."""
    torch.manual_seed(0)
    cls, config = model
    base = (base_class or cls)(config).to(dtype)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.normal_()
    base.save_pretrained(directory / "base")
    wrapped = peft.get_peft_model(loaded(cls, directory), peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    wrapped.save_pretrained(directory / "adapter")
    return directory


def loaded(cls: Any, directory: Path) -> Any:
    return cls.from_pretrained(directory / "base", dtype="auto")


def merge_by_peft(directory: Path, cls: Any, autocast: bool = True) -> Path:
    model = peft.PeftModel.from_pretrained(
        loaded(cls, directory), directory / "adapter", autocast_adapter_dtype=autocast
    )
    model.merge_and_unload().save_pretrained(directory / "by_peft")
    return directory / "by_peft"


def differences(directory: Path, model: Model, in_memory: bool = False, autocast: bool = True) -> str:
    """How our merged checkpoint differs from peft's."""
    cls, _ = model
    layout = from_transformers(loaded(cls, directory), strict=False) if in_memory else None
    merge = merge_lora(directory / "adapter", layout=layout, autocast_adapter_dtype=autocast)
    hf_stream.convert(directory / "base", directory / "merged", layout=merge)
    expected = merge_by_peft(directory, cls, autocast)
    return str(hf_stream.verify(expected, directory / "merged"))


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


CASES: dict[str, tuple[Model, bool, dict[str, Any]]] = {
    "linear": (LLAMA, False, {"target_modules": "all-linear"}),
    "embedding": (LLAMA, False, {"target_modules": ["embed_tokens", "lm_head"]}),
    "whole modules": (LLAMA, False, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "tied embedding": (TIED, False, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embedding, in memory": (TIED, True, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied head as a whole": (TIED, True, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied embedding as a whole": (TIED, True, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "both as a whole": (TIED, False, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "conv1d of gpt2": (GPT2, False, {"target_modules": ["c_attn", "c_proj"], "lora_bias": True, "bias": "all"}),
    "square conv1d of gpt2": (GPT2, False, {"target_modules": ["attn.c_proj"]}),
    "bert": (BERT, False, {"target_modules": ["query", "dense"], "task_type": "SEQ_CLS", "bias": "lora_only"}),
    "t5": (T5, False, {"target_modules": ["q", "wi"]}),
    "conv2d, 3 by 3 and 1 by 1": (RESNET, False, {"target_modules": ["convolution"]}),
    "conv1d": (WHISPER, False, {"target_modules": ["conv1", "conv2"], "lora_bias": True}),
    "dora": (LLAMA, False, {"target_modules": ["embed_tokens", "k_proj"], "use_dora": True}),
    "dora of gpt2": (GPT2, False, {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "dora of conv2d": (RESNET, False, {"target_modules": ["convolution"], "use_dora": True}),
    "experts": (QWEN3_MOE, True, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts by old names": (QWEN3_MOE, True, {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "turned experts": (
        GPT_OSS,
        False,
        {
            "target_modules": ["q_proj"],
            "target_parameters": [*EXPERTS, "router.weight"],
            "rank_pattern": {"experts.down_proj": 2},
        },
    ),
    "parameters of linear layers": (GPT2, False, {"target_modules": [], "target_parameters": ["c_fc.weight"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_merge_and_unload(tmp_path: Path, case: str) -> None:
    model, in_memory, options = CASES[case]
    prepare(tmp_path, model, torch.bfloat16, r=4, lora_alpha=7, **options)
    assert differences(tmp_path, model, in_memory) == "no difference"


class Odd(nn.Module):
    """Linear layers, square and not, an embedding and convolutions, of odd sizes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.square = nn.Linear(13, 13)
        self.one = nn.Conv2d(13, 5, 1)
        self.three = nn.Conv1d(5, 3, 3)
        self.to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    rank=st.integers(1, 9),
    alpha=st.one_of(st.integers(1, 40), st.floats(0.1, 9)),
    ranks=st.dictionaries(st.sampled_from(["up", "sq.*", "one"]), st.integers(1, 5), max_size=2),
    alphas=st.dictionaries(st.sampled_from(["up", "(three|one)", "nothing"]), st.integers(1, 5), max_size=2),
    base=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    saved=st.sampled_from([None, torch.float64, torch.bfloat16]),
    rslora=st.booleans(),
    kind=st.sampled_from(["plain", "dora", "bias"]),
    autocast=st.booleans(),
)
def test_any_rank_alpha_dtype_and_options(
    rank: int,
    alpha: float,
    ranks: dict[str, int],
    alphas: dict[str, int],
    base: torch.dtype,
    saved: torch.dtype | None,
    rslora: bool,
    kind: str,
    autocast: bool,
) -> None:
    targets = ["up", "square", "one", "three", *([] if kind == "bias" else ["embedding"])]
    config = peft.LoraConfig(
        target_modules=targets, r=rank, lora_alpha=alpha, rank_pattern=ranks, alpha_pattern=alphas,
        use_rslora=rslora, use_dora=kind == "dora", lora_bias=kind == "bias",
    )  # fmt: skip
    torch.manual_seed(rank)
    plain = Odd(base)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model = peft.PeftModel(plain, config, autocast_adapter_dtype=autocast)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    adapter = peft.get_peft_model_state_dict(model)
    if saved is not None:
        # Files may hold another dtype than the model will.
        adapter = {name: tensor.to(saved) for name, tensor in adapter.items()}
        peft.set_peft_model_state_dict(model, adapter)
    adapter = {name: tensor.clone() for name, tensor in adapter.items()}
    expected = model.merge_and_unload().state_dict()

    merge = merge_lora(adapter, config, autocast_adapter_dtype=autocast)
    merged = hf_stream.materialize(merge({name: LazyTensor.from_tensor(t) for name, t in before.items()}))

    assert merged.keys() == expected.keys()
    assert [name for name in expected if not same_bits(merged[name], expected[name])] == []


def adapter_for(shape: tuple[int, int], r: int = 2, **config: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter of one linear layer `up`."""
    out, into = shape
    tensors = {
        "base_model.model.up.lora_A.weight": torch.randn(r, into),
        "base_model.model.up.lora_B.weight": torch.randn(out, r),
    }
    return tensors, {"peft_type": "LORA", "r": r, "lora_alpha": 4, **config}


def test_only_the_product_and_a_few_rows_are_held() -> None:
    shape = (9000, 1000)
    merged = merge_lora(*adapter_for(shape))({"up.weight": LazyTensor.from_tensor(torch.zeros(shape))})
    product = 4 * shape[0] * shape[1]
    assert product < working_set(merged.values()) < product + 60 * 2**20
    assert merged["up.weight"][:3].materialize().shape == (3, 1000)


def test_large_weights_are_added_in_pieces_without_a_trace(tmp_path: Path) -> None:
    shape = (9001, 1000)
    tensors, config = adapter_for(shape)
    base = torch.randn(shape, dtype=torch.bfloat16)
    merged = merge_lora(tensors, config)({"up.weight": base.clone()})["up.weight"].materialize()
    a, b = (tensors[f"base_model.model.up.lora_{x}.weight"] for x in "AB")
    base += b @ a * 2.0
    assert same_bits(merged, base)


def test_the_adapter_can_be_given_as_a_file_or_a_directory_or_tensors(tmp_path: Path) -> None:
    prepare(tmp_path, LLAMA, target_modules=["q_proj"])
    base = hf_stream.open_checkpoint(tmp_path / "base")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    expected = hf_stream.materialize(merge_lora(tmp_path / "adapter")(base))
    for layout in (
        merge_lora(file),
        merge_lora(hf_stream.open_checkpoint(file), config),
        merge_lora(file, tmp_path / "adapter" / "adapter_config.json"),
        merge_lora(file, peft.PeftConfig.from_pretrained(tmp_path / "adapter")),
    ):
        merged = hf_stream.materialize(layout(base))
        assert all(same_bits(merged[name], expected[name]) for name in expected)


def test_a_head_that_the_base_lacks_is_added(tmp_path: Path) -> None:
    model = (transformers.LlamaForSequenceClassification, transformers.LlamaConfig(**SIZES, pad_token_id=0))
    options = {"base_class": LLAMA[0], "target_modules": ["q_proj"], "task_type": "SEQ_CLS"}
    prepare(tmp_path, model, torch.bfloat16, **options)
    # The file of the causal model has a head of its own, which nobody asked to leave out.
    assert differences(tmp_path, model) == "'lm_head.weight' is only in the second"


def test_a_base_of_other_names_is_merged_through_the_names_in_memory(tmp_path: Path) -> None:
    prepare(tmp_path, BERT, base_class=transformers.BertModel, target_modules=["query"], task_type="SEQ_CLS")
    with pytest.raises(hf_stream.LayoutError, match=r"lacks 'bert.encoder.*layout=from_transformers"):
        hf_stream.convert(tmp_path / "base", tmp_path / "refused", layout=merge_lora(tmp_path / "adapter"))
    assert differences(tmp_path, BERT, in_memory=True) == "no difference"


@pytest.mark.parametrize("case", ["tied head as a whole", "tied embedding as a whole", "both as a whole"])
def test_transformers_ties_no_weights_that_are_two_now(tmp_path: Path, case: str) -> None:
    model, in_memory, options = CASES[case]
    prepare(tmp_path, model, **options)
    assert differences(tmp_path, model, in_memory) == "no difference"
    merged, expected = (model[0].from_pretrained(tmp_path / name).state_dict() for name in ("merged", "by_peft"))
    assert all(same_bits(merged[name], tensor) for name, tensor in expected.items())
    if in_memory:
        with pytest.raises(hf_stream.LayoutError, match=r"was trained as a whole, and the base ties it"):
            hf_stream.convert(tmp_path / "base", tmp_path / "refused", layout=merge_lora(tmp_path / "adapter"))
        assert not (tmp_path / "refused").exists()


def test_a_trained_tensor_that_the_base_has_under_another_name_is_missing_whatever_its_shape() -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "all"}
    base = {"norm.beta": torch.zeros(4), "out.bias": torch.zeros(4), "embed.weight": torch.zeros(6, 4)}
    trained = {"norm.bias": torch.ones(4), "out.bias": torch.ones(4), "embed.weight": torch.ones(6, 4)}
    adapter = {f"base_model.model.{name}": tensor for name, tensor in trained.items()}
    with pytest.raises(hf_stream.LayoutError, match=r"the base lacks 'norm\.bias'"):
        merge_lora(adapter, config)(base)
    del adapter["base_model.model.norm.bias"]
    adapter["base_model.model.head.weight"] = 2 * torch.ones(6, 4)
    with pytest.raises(hf_stream.LayoutError, match=r"the base lacks 'head\.weight'"):
        merge_lora(adapter, config)(base)
    adapter["base_model.model.head.weight"] = torch.ones(6, 4)
    assert "head.weight" not in merge_lora(adapter, config)(base)


def test_merging_changes_tied_weights_together() -> None:
    tensors, config = adapter_for((4, 4))
    shared = LazyTensor.from_tensor(torch.randn(4, 4))
    merged = merge_lora(tensors, config)({"up.weight": shared, "head.weight": shared, "other.weight": torch.ones(1)})
    assert merged["head.weight"] is merged["up.weight"]
    assert not torch.equal(merged["up.weight"].materialize(), shared.materialize())


REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor], dict[str, Any]], object], str]] = {
    "other methods": (lambda _, config: config.update(peft_type="LOHA"), "of type LOHA"),
    "a start that changes the base": (
        lambda _, config: config.update(init_lora_weights="pissa"),
        "pissa.*base weights",
    ),
    "variants": (lambda _, config: config.update(alora_invocation_tokens=[1]), "activated LoRA"),
    "half an adapter": (lambda tensors, _: tensors.pop("base_model.model.up.lora_B.weight"), r"lacks.*lora_B\.weight"),
    "another rank than the config's": (lambda _, config: config.update(r=3), "rank 2.*but 3"),
    "no rank": (lambda _, config: config.update(r=None), "no number 'r'"),
    "a pattern that is none": (lambda _, config: config.update(rank_pattern={"(": 1}), "not a regular expression"),
    "magnitudes that are not there": (lambda _, config: config.update(use_dora=True), "no magnitudes"),
    "another base": (
        lambda tensors, _: tensors.update({"base_model.model.up.lora_A.weight": torch.ones(2, 9)}),
        r"shape \[6, 5\] in the base, which does not fit.*\[6, 2\] by \[2, 9\]",
    ),
    "a module that the base lacks": (
        lambda tensors, _: tensors.update({f"x.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}),
        "the base lacks 'x.weight'",
    ),
    "tensors of no known use": (
        lambda tensors, _: tensors.update({"base_model.model.up.lora_E": torch.ones(2)}),
        "the base lacks 'up.lora_E'",
    ),
    "a bias without a base for it": (
        lambda tensors, _: tensors.update({"base_model.model.up.lora_B.bias": torch.ones(6)}),
        "the base has none to add it to",
    ),
    "a resized embedding": (
        lambda tensors, _: tensors.update({"base_model.model.up.base_layer.weight": torch.ones(9, 5)}),
        r"'up.weight' has shape \[6, 5\] in the base, \[9, 5\] in.*resize",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    change, message = REFUSED[case]
    tensors, config = adapter_for((6, 5))
    change(tensors, config)
    with pytest.raises(hf_stream.LayoutError, match=message):
        merge_lora(tensors, config)({"up.weight": torch.ones(6, 5)})


def test_refuses_a_base_that_is_quantized() -> None:
    with pytest.raises(hf_stream.LayoutError, match=r"float8_e4m3fn cannot be merged into; dequantize"):
        merge_lora(*adapter_for((6, 5)))({"up.weight": torch.ones(6, 5).to(torch.float8_e4m3fn)})


def test_square_weights_are_as_the_others_or_as_the_config_says() -> None:
    (tensors, config), base = adapter_for((4, 4)), {"up.weight": torch.zeros(4, 4)}
    straight = merge_lora(tensors, config)(base)["up.weight"].materialize()
    turned = merge_lora(tensors, {**config, "fan_in_fan_out": True})(base)["up.weight"].materialize()
    assert torch.equal(turned, straight.T)
    asked = merge_lora(tensors, config, fan_in_fan_out=True)(base)["up.weight"].materialize()
    assert torch.equal(asked, turned)
    tensors |= {"wide.lora_A.weight": torch.ones(2, 3), "wide.lora_B.weight": torch.ones(5, 2)}
    like_wide = merge_lora(tensors, config)({**base, "wide.weight": torch.zeros(3, 5)})["up.weight"].materialize()
    assert torch.equal(like_wide, turned)


def test_square_weights_among_others_of_both_kinds_must_be_told() -> None:
    tensors, config = adapter_for((4, 4))
    base = {"up.weight": torch.zeros(4, 4), "wide.weight": torch.zeros(3, 5), "high.weight": torch.zeros(5, 3)}
    for name in ("wide", "high"):
        tensors |= {f"{name}.lora_A.weight": torch.ones(2, 3), f"{name}.lora_B.weight": torch.ones(5, 2)}
    with pytest.raises(hf_stream.LayoutError, match=r"'up\.weight': square weights do not tell"):
        merge_lora(tensors, config)(base)
    assert merge_lora(tensors, config, fan_in_fan_out=False)(base).keys() == base.keys()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(hf_stream.CheckpointError, match=r"adapter_model.safetensors' does not exist"):
        merge_lora(tmp_path)
    tensors, _ = adapter_for((4, 4))
    with pytest.raises(hf_stream.LayoutError, match=r"needs config="):
        merge_lora(tensors)
    hf_stream.save_checkpoint(tensors, tmp_path / "saved")
    hf_stream.save_checkpoint(tensors, tmp_path / "fifo" / "adapter_model.safetensors")
    os.mkfifo(tmp_path / "fifo" / "adapter_config.json")
    with pytest.raises(hf_stream.CheckpointError, match=r"adapter_config.json' is a FIFO"):
        merge_lora(tmp_path / "fifo")
    with pytest.raises(hf_stream.CheckpointError, match=r"adapter_config.json' does not exist"):
        merge_lora(tmp_path / "saved" / "model.safetensors")


def test_has_no_inverse() -> None:
    with pytest.raises(hf_stream.LayoutError, match="cannot be inverted"):
        merge_lora(*adapter_for((4, 4))).inverse  # noqa: B018


def test_a_second_run_knows_that_it_is_the_same(tmp_path: Path) -> None:
    prepare(tmp_path, LLAMA, target_modules=["q_proj"])
    first, second = (
        hf_stream.plan_conversion(tmp_path / "base", layout=merge_lora(tmp_path / "adapter")) for _ in range(2)
    )
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize(("model", "name"), [(LLAMA, "merge-lora"), (QWEN3_MOE, "merge_lora_in_memory")])
def test_on_the_command_line(tmp_path: Path, model: Model, name: str) -> None:
    targets = EXPERTS if model is QWEN3_MOE else None
    prepare(tmp_path, model, torch.bfloat16, target_modules=["q_proj"], target_parameters=targets)
    adapter = tmp_path / "C:adapter=1.py"
    (tmp_path / "adapter").rename(adapter)
    shown = run("convert", tmp_path / "base", tmp_path / "merged", "--layout", f"{name}={adapter}")
    assert shown.exit_code == 0, shown.stderr
    adapter.rename(tmp_path / "adapter")
    assert not hf_stream.verify(merge_by_peft(tmp_path, model[0]), tmp_path / "merged")


def test_the_command_line_says_what_is_missing(tmp_path: Path) -> None:
    prepare(tmp_path, LLAMA, target_modules=["q_proj"])
    (tmp_path / "base" / "config.json").unlink()
    for layout, message in (
        ("merge-lora=nowhere", "'nowhere' does not exist"),
        ("merge-lora", "Did you mean 'merge-lora=PATH'?"),
        (f"merge-lora-in-memory={tmp_path / 'adapter'}", "There is no config.json beside"),
    ):
        shown = run("convert", tmp_path / "base", tmp_path / "merged", "--layout", layout)
        assert shown.exit_code == 2
        assert message in shown.stderr
