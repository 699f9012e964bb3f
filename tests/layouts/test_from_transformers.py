from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from samples import same_bits
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedModel, Qwen3MoeForCausalLM

import hf_stream
from hf_stream import LayoutError
from hf_stream.layouts import Drop, Layout, Rename, from_transformers, stacked_experts
from hf_stream.lazy import LazyTensor, reads

# Experts merged in many ways, joined projections, weights moved about, models in models, weight norm.
TYPES = [
    "deepseek_v3",
    "dots1",
    "ernie4_5_vl_moe",
    "glm4v_moe",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "lfm2_moe",
    "llava",
    "minimax",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3_moe",
    "siglip",
    "timesfm2_5",
    "unlimited_ocr",
    "detr",
]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Path]]:
    """A small random model of a type, and the directory to which plain transformers has saved it."""
    made: dict[str, tuple[PreTrainedModel, Path]] = {}

    def make(model_type: str) -> tuple[PreTrainedModel, Path]:
        if model_type not in made:
            cls = architectures.primary_class(model_type)
            assert cls is not None
            model = architectures.random_model(cls, architectures.small_config(model_type, cls))
            path = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(path)
            made[model_type] = model, path
        return made[model_type]

    return make


@pytest.fixture
def bert(tmp_path: Path) -> tuple[BertForMaskedLM, Path]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = architectures.fill(BertForMaskedLM(BertConfig(**sizes, vocab_size=50)))
    model.save_pretrained(tmp_path / "bert")
    return model, tmp_path / "bert"


def assert_same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(plain)
    for name, tensor in ours.items():
        real = tensor.materialize() if isinstance(tensor, LazyTensor) else tensor
        assert same_bits(real, plain[name]), name


@pytest.mark.parametrize("model_type", TYPES)
def test_a_checkpoint_becomes_what_the_model_holds_and_comes_back(
    model_type: str, saved: Callable[[str], tuple[PreTrainedModel, Path]], tmp_path: Path
) -> None:
    model, path = saved(model_type)
    plain = type(model).from_pretrained(path)
    layout = from_transformers(plain.config)
    checkpoint = hf_stream.open_checkpoint(path)

    assert_same(layout(checkpoint), plain.state_dict())

    hf_stream.convert(path, tmp_path / "memory", layout=layout)
    fresh = type(model)(plain.config)
    fresh.load_state_dict(load_file(tmp_path / "memory" / "model.safetensors"))
    assert_same(dict(fresh.state_dict()), plain.state_dict())
    hf_stream.convert(tmp_path / "memory", tmp_path / "again", layout=layout.inverse)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()

    # Twice, as transformers changes its own conversions when it saves.
    for directory in ("once", "twice"):
        plain.save_pretrained(tmp_path / directory)
    of_the_model = from_transformers(plain)
    assert_same(of_the_model(checkpoint), plain.state_dict())
    back = of_the_model.inverse(plain.state_dict())
    assert not hf_stream.verify(back, tmp_path / "twice")


def test_all_of_it_is_symbolic_and_a_part_of_a_merged_weight_reads_its_own_bytes(
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
) -> None:
    model, path = saved("qwen3_moe")
    merged = from_transformers(model)(hf_stream.open_checkpoint(path))
    name, weight = next((name, t) for name, t in merged.items() if name.endswith("gate_up_proj"))
    expert = weight[2, : weight.shape[1] // 2]  # its gate
    assert sum(region.nbytes for region in reads([expert])) == expert.numel() * expert.itemsize
    assert same_bits(expert.materialize(), model.state_dict()[name][2, : weight.shape[1] // 2])
    whole = sum(tensor.numel() * tensor.itemsize for tensor in merged.values())
    plan = hf_stream.plan_conversion(path, layout=from_transformers(model))
    assert sum(plan.nbytes_read().values()) == whole
    assert plan.peak_nbytes(buffer_size=0) == 0


def test_dtypes_are_those_of_the_file(saved: Callable[[str], tuple[PreTrainedModel, Path]], tmp_path: Path) -> None:
    model, path = saved("qwen3_moe")
    hf_stream.convert(path, tmp_path / "half", dtype=torch.float16)
    halves = from_transformers(model.config)(hf_stream.open_checkpoint(tmp_path / "half"))
    assert {tensor.dtype for tensor in halves.values()} == {torch.float16}
    assert {tensor.dtype for tensor in from_transformers(model).inverse(halves).values()} == {torch.float16}


def test_real_and_meta_tensors_stay_what_they_are_and_are_not_touched(
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
) -> None:
    model, path = saved("qwen3_moe")
    layout = from_transformers(model)
    file = load_file(path / "model.safetensors")
    result = layout(file)
    assert_same(result, model.state_dict())
    assert not any(vars(tensor) for tensor in file.values())
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in file.items()}
    assert_same(layout(parameters), model.state_dict())
    assert not any(vars(tensor) for tensor in parameters.values())
    assert all(type(tensor) is torch.Tensor for tensor in result.values())
    meta = {name: tensor.to("meta") for name, tensor in file.items()}
    assert {name: tensor.shape for name, tensor in layout.inverse(layout(meta)).items()} == {
        name: tensor.shape for name, tensor in file.items()
    }


def test_the_process_is_left_as_it_was(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = saved("qwen3_moe")
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "maybe")
    before = copy.deepcopy(model.config.to_dict()), dict(model.state_dict()), torch.get_default_dtype()
    layout = from_transformers(model)
    layout.inverse(layout(hf_stream.open_checkpoint(path)))
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "maybe"
    assert model.config.to_dict() == before[0]
    assert all(
        tensor is before[1][name] or same_bits(tensor, before[1][name]) for name, tensor in model.state_dict().items()
    )
    assert torch.get_default_dtype() == before[2]


@pytest.mark.parametrize(
    "written",
    [
        {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"},
        {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"},
        {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"}
        | {"cls.predictions.bias", "cls.predictions.decoder.bias"},
    ],
)
def test_tied_weights_come_under_each_name_whatever_the_file_has(
    written: set[str], bert: tuple[BertForMaskedLM, Path], tmp_path: Path
) -> None:
    model, path = bert
    state = model.state_dict()
    file = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if name not in TIED}
    file |= {name: state[name] for name in written}
    layout = from_transformers(model)
    assert_same(layout(file), state)
    assert not hf_stream.verify(layout.inverse(layout(file)), path)
    with pytest.raises(LayoutError, match=r"wants shape \[50, 32\], got \[3\]") as raised:
        layout({name: torch.zeros(3) if name in written and "weight" in name else t for name, t in file.items()})
    assert "is missing" not in str(raised.value)
    hf_stream.save_checkpoint(layout(file), tmp_path / "memory")
    model.load_state_dict(load_file(tmp_path / "memory" / "model.safetensors"))


TIED = {
    "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.bias",
    "cls.predictions.decoder.bias",
}


def test_old_names_and_a_base_models_prefix_are_dealt_with_as_in_transformers(
    bert: tuple[BertForMaskedLM, Path], tmp_path: Path
) -> None:
    model, path = bert
    file = load_file(path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in file.items()
    }
    assert old.keys() != file.keys()
    assert_same(from_transformers(model)(old), model.state_dict())

    without_pooler = BertModel(model.config, add_pooling_layer=False)
    without_pooler.save_pretrained(tmp_path / "base")
    head = {name: tensor for name, tensor in file.items() if name.startswith("cls.")}
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert not any(name.startswith("bert.") for name in base)
    into_head = from_transformers(model)(base | head)
    assert same_bits(into_head["bert.embeddings.LayerNorm.weight"], base["embeddings.LayerNorm.weight"])
    with pytest.raises(LayoutError, match=r"6 misfits.*'cls\.predictions\.bias' is missing"):
        from_transformers(model)(base)

    config = copy.deepcopy(model.config)
    config.architectures = ["BertModel"]
    with pytest.raises(LayoutError, match=r"'cls\.predictions\.bias' is not in the model"):
        from_transformers(config)(file)
    body = from_transformers(config, strict=False)(file)
    assert not any(name.startswith("pooler") for name in body)
    assert same_bits(body["embeddings.LayerNorm.weight"], file["bert.embeddings.LayerNorm.weight"])


def test_a_model_remembers_the_names_it_was_loaded_from(bert: tuple[BertForMaskedLM, Path], tmp_path: Path) -> None:
    _, path = bert
    file = load_file(path / "model.safetensors")
    (tmp_path / "odd").mkdir()
    odd = {name.replace("bert.encoder.", "odd.stack."): tensor for name, tensor in file.items()}
    save_file(odd, tmp_path / "odd" / "model.safetensors", metadata={"format": "pt"})
    model = BertForMaskedLM.from_pretrained(
        tmp_path / "odd", config=BertConfig.from_pretrained(path), key_mapping={r"odd\.stack\.": "bert.encoder."}
    )
    model.save_pretrained(tmp_path / "plain")
    layout = from_transformers(model)
    assert_same(layout(odd), model.state_dict())
    assert_same(layout(file), model.state_dict())
    assert not hf_stream.verify(layout.inverse(model.state_dict()), tmp_path / "plain")
    with pytest.raises(LayoutError, match="misfits"):
        from_transformers(model.config)(odd)


def rename(old: str, new: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


LAYER = "model.layers.1."
EXPERT = f"{LAYER}mlp.experts.2.up_proj.weight"
MISFITS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda t: t.pop("model.norm.weight"), r"1 misfit with Qwen3MoeForCausalLM: 'model\.norm\.weight' is missing\."),
    (
        lambda t: t.pop(EXPERT),
        r"1 misfit .*experts\.gate_up_proj' cannot be built \(the checkpoint has no '\S*\.1\.mlp\.experts\.2\.up_proj",
    ),
    (
        lambda t: [t.pop(f"{LAYER}mlp.experts.{n}.{p}_proj.weight") for n in range(4) for p in ("gate", "up")],
        r"1 misfit .*gate_up_proj' is missing \(the checkpoint has no '\S*\.1\.mlp\.experts\.0\.gate_proj\.weight', "
        r"'model\.layers\.1\.mlp\.experts\.1\.gate_proj\.weight' and 6 more\)",
    ),
    (
        lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
        r"1 misfit .*'model\.norm\.weight': the model wants shape \[32\], got \[5\]",
    ),
    (
        lambda t: t.update({EXPERT: torch.zeros(5)}),
        r"1 misfit .*gate_up_proj' cannot be built: stack expects each tensor to be equal size",
    ),
    (
        rename("model.norm.weight", "model.nrm.weight"),
        r"2 misfits.*'model\.norm\.weight' is missing; 'model\.nrm\.weight' is not in the model; "
        r"the nearest name that it has is 'model\.norm\.weight'",
    ),
    (
        rename(EXPERT, EXPERT.replace("layers.1", "layers.7")),
        r"layers\.7\.mlp\.experts\.2\.up_proj\.weight' \('model\.layers\.7\.mlp\.experts\.gate_up_proj' in memory\)",
    ),
    (lambda t: t.clear(), r"\d\d misfits.*; and \d\d more\. Use the config that belongs"),
]


@pytest.mark.parametrize(("spoil", "message"), MISFITS)
def test_what_does_not_fit_is_named(
    spoil: Callable[[dict[str, Any]], Any], message: str, saved: Callable[[str], tuple[PreTrainedModel, Path]]
) -> None:
    model, path = saved("qwen3_moe")
    tensors = dict(hf_stream.open_checkpoint(path))
    spoil(tensors)
    with pytest.raises(LayoutError, match=message):
        from_transformers(model)(tensors)


def test_without_strict_names_may_be_missing_or_left_over_but_shapes_must_fit(
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
) -> None:
    model, path = saved("qwen3_moe")
    lenient = from_transformers(model, strict=False)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["other"] = torch.zeros(1)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}
    assert_same(lenient(tensors), expected)
    assert lenient.inverse({**expected, "other": torch.zeros(1)}).keys() == tensors.keys() - {"other"}
    for name, misfit in (("lm_head.weight", "the model wants shape"), (EXPERT, "cannot be built")):
        with pytest.raises(LayoutError, match=misfit):
            lenient({**tensors, name: torch.zeros(3)})


def test_the_way_back_names_what_does_not_fit_as_well(saved: Callable[[str], tuple[PreTrainedModel, Path]]) -> None:
    model, _ = saved("qwen3_moe")
    back, state = from_transformers(model).inverse, dict(model.state_dict())
    with pytest.raises(LayoutError, match=r"'model\.norm\.weight' is missing"):
        back({name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    with pytest.raises(LayoutError, match=r"'norm\.weight' is not in the model; the nearest.*'model\.norm\.weight'"):
        back({**state, "norm.weight": torch.zeros(32)})
    with pytest.raises(LayoutError, match=r"wants shape \[99, 32\], got \[32, 99\]"):
        back({**state, "lm_head.weight": state["lm_head.weight"].T})


def test_what_transformers_leaves_unread_on_purpose_is_left_out(
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
) -> None:
    model, path = saved("qwen3_moe")
    tensors = dict(hf_stream.open_checkpoint(path))
    tensors[f"{LAYER}self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    assert from_transformers(model)(tensors).keys() == model.state_dict().keys()


def test_the_content_of_a_config_file_will_do(saved: Callable[[str], tuple[PreTrainedModel, Path]]) -> None:
    model, path = saved("qwen3_moe")
    layout = from_transformers(model.config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]})
    assert repr(layout) == "from_transformers(Qwen3MoeForCausalLM)"
    assert repr(layout.inverse) == "from_transformers(Qwen3MoeForCausalLM).inverse"
    assert layout(hf_stream.open_checkpoint(path)).keys() == model.state_dict().keys()
    assert repr(from_transformers(BertConfig(), strict=False)) == "from_transformers(BertModel, strict=False)"
    assert layout.inverse.inverse == layout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_type": "nothing"}, "does not know the model_type 'nothing'"),
        ({}, "does not know the model_type None"),
        ({"model_type": ["bert"]}, "does not know the model_type"),
        ({"model_type": "bert", "architectures": ["MyBert"]}, "transformers has no model 'MyBert'"),
        ({"model_type": "bert", "architectures": ["set_seed"]}, "transformers has no model 'set_seed'"),
        ({"model_type": "bert", "architectures": True}, "transformers has no model True"),
        (torch.nn.Linear(1, 1), "takes a model of transformers or a config, got Linear"),
        (None, "takes a model of transformers or a config, got NoneType"),
    ],
)
def test_what_has_no_conversions_is_refused(given: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_transformers(given)


class OwnBert(BertModel):
    """Code that is not transformers', which looks at values while it makes a model."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    linspace = torch.linspace
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = OwnBert(BertConfig(**sizes, vocab_size=50))
    model.save_pretrained(tmp_path)
    layout = from_transformers(model)
    assert repr(layout) == "from_transformers(OwnBert)"
    assert_same(layout(load_file(tmp_path / "model.safetensors")), model.state_dict())
    assert torch.linspace is linspace


class Forgetful(OwnBert):
    """A model that does not save all it holds."""

    _keys_to_ignore_on_save = ("pooler.dense.bias",)


def test_what_transformers_does_not_save_is_left_out_and_need_not_be_there(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = Forgetful(BertConfig(**sizes, vocab_size=50))
    model.save_pretrained(tmp_path)
    back, state = from_transformers(model).inverse, dict(model.state_dict())
    assert not hf_stream.verify(back(state), tmp_path)
    del state["pooler.dense.bias"]
    assert not hf_stream.verify(back(state), tmp_path)


def test_an_architecture_that_transformers_keeps_to_itself() -> None:
    config = {"model_type": "unlimited_ocr_vision_encoder", "architectures": ["UnlimitedOcrVisionEncoder"]}
    assert repr(from_transformers(config)) == "from_transformers(UnlimitedOcrVisionEncoder)"


def test_a_quantized_model_is_refused(bert: tuple[BertForMaskedLM, Path]) -> None:
    model, _ = bert
    model.hf_quantizer = object()
    with pytest.raises(LayoutError, match="BertForMaskedLM is quantized"):
        from_transformers(model)


def test_it_composes_with_other_layouts(saved: Callable[[str], tuple[PreTrainedModel, Path]]) -> None:
    model, path = saved("qwen3_moe")
    checkpoint = hf_stream.open_checkpoint(path)
    wrapped = {f"wrapped.{name}": tensor for name, tensor in checkpoint.items()}
    unwrap = Layout([Rename("wrapped.{rest:+}", "{rest}")])
    layout = unwrap | from_transformers(model) | Layout([Rename("lm_head.weight", "head")])
    expected = {name.replace("lm_head.weight", "head"): tensor for name, tensor in model.state_dict().items()}
    assert_same(layout(wrapped), expected)
    assert not hf_stream.verify(layout.inverse(layout(wrapped)), wrapped)

    part = from_transformers(model).scoped("language_model.", "text.")
    whole = {f"language_model.{name}": tensor for name, tensor in checkpoint.items()} | {"vision.w": torch.zeros(2)}
    assert part(whole).keys() == {f"text.{name}" for name in model.state_dict()} | {"vision.w"}
    assert part.inverse(part(whole)).keys() == whole.keys()


def test_it_is_the_ready_made_layout_where_there_is_one(
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
) -> None:
    model, path = saved("qwen3_moe")
    checkpoint = hf_stream.open_checkpoint(path)
    assert not hf_stream.verify(from_transformers(model)(checkpoint), stacked_experts(model.config)(checkpoint))
    assert isinstance(model, Qwen3MoeForCausalLM)


def test_a_model_is_filled_in_place_from_its_checkpoint(
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
) -> None:
    model, path = saved("qwen3_moe")
    other = type(model)(model.config)
    places = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    layout = from_transformers(other) | Layout([Drop("nothing.{of:+}.this")])
    hf_stream.load_into(other, layout(hf_stream.open_checkpoint(path)))
    assert_same(dict(other.state_dict()), model.state_dict())
    assert places == {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}


def test_a_model_that_was_changed_is_taken_as_it_is(tmp_path: Path, bert: tuple[BertForMaskedLM, Path]) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model: Any = architectures.fill(BertForMaskedLM(BertConfig(**sizes, vocab_size=50)))
    model.bert.encoder.layer = model.bert.encoder.layer[:1]
    model.value = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 1))
    model.save_pretrained(tmp_path / "changed")
    weights = load_file(tmp_path / "changed" / "model.safetensors")
    before = dict(model.named_parameters())
    layout = from_transformers(model)
    loaded = layout(weights)
    state = model.state_dict()
    assert list(loaded) == list(state)
    assert all(same_bits(loaded[name], state[name]) for name in state)
    assert {name: id(weight) for name, weight in model.named_parameters()} == {n: id(w) for n, w in before.items()}
    again = layout.inverse(state)
    assert again.keys() == weights.keys()
    assert all(same_bits(again[name], weights[name]) for name in weights)
    with pytest.raises(LayoutError, match="value"):
        from_transformers(bert[0])(weights)


def test_the_weights_of_a_model_are_not_kept() -> None:
    # Its modules have hooks of their own methods.
    model: Any = architectures.random_model(
        transformers.MambaForCausalLM, architectures.small_config("mamba", transformers.MambaForCausalLM)
    )
    kept = [weakref.ref(weight) for weight in model.parameters()]
    layout = from_transformers(model)
    del model
    gc.collect()
    assert not any(weight() is not None for weight in kept)
    assert "backbone.embeddings.weight" in layout.skeleton().state_dict()
