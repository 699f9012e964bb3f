"""Every model type that transformers knows, as a small model with random weights."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# A model with no more elements is small enough; one with no more than TOLERABLE if the boldest rules give none smaller.
SMALL = 800_000
TOLERABLE = 6_000_000
BOLD = 3

RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
FEATURES = {**RESNET, "out_features": ["stage2", "stage3", "stage4"]}
LONG = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]} | {
    f"{kind}_{ratio}ratio": [3, 1, 1]
    for kind in ("vertical_long_to_small_conv", "horizontal_small_to_long_conv", "symmetric_conv_long")
    for ratio in ("long", "mid", "short")
}

# What default configs leave open and a model cannot do without, or what the rules below cannot know, by model type.
GIVEN: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGBZ": 6}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "conditional_detr": {"backbone_config": RESNET},
    "cosmos3_edge_text": {"head_dim": 8, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "d_fine": {"backbone_config": FEATURES, "encoder_in_channels": [16, 32, 32]},
    "dab-detr": {"backbone_config": RESNET},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}},
    "deepseek_ocr2_text": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "deformable_detr": {"backbone_config": FEATURES},
    "detr": {"backbone_config": RESNET},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1},
    "dots3_note_audio_encoder": {"hidden_size": 32, "num_attention_heads": 4, "adapter_input_size": 32},
    "dots3_note_text": {"use_sliding_window": False, "num_attention_heads": 4, "num_key_value_heads": 4},
    "dots3_note_vision_encoder": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "adapter_in_dim": 32,
        "per_layer_config": {},
    },
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000000|>": 7}},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
    },
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 0}},
    "gradium_phonon_tts": {"num_key_value_heads": 4},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "4/8",
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 64},
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "hidden_size": 64,
            "encoder_hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
        },
    },
    "hiera": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 8},
    "informer": {"prediction_length": 4},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "ministral": {"head_dim": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_asr_audio": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {"vision_config": {"model_type": "radio", "video_temporal_patch_size": 2}},
    "omdet-turbo": {"backbone_config": FEATURES, "encoder_in_channels": [16, 32, 32]},
    "pp_ocrv5_server_det": {"intraclass_block_config": LONG, "kernel_list": [3, 2, 2]},
    "pp_ocrv6_medium_det": {"intraclass_block_config": LONG, "kernel_list": [3, 2, 2]},
    "qwen2_5_omni_bigvgan": {
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
    },
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "qwen4_exp_text": {"indexer_budget": 64, "indexer_compress_ratio": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1}
    | {"indexer_head_dim": 64, "head_dim": 64},
    "reformer": {"is_decoder": True},
    "sapiens2": {
        "head_config": {"model_type": "sapiens2_head", "upsample_out_channels": [8], "conv_out_channels": [8]}
    },
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"model_type": "t5gemma2_text", "dropout_rate": 0.0}},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "table-transformer": {"backbone_config": RESNET},
    "time_series_transformer": {"prediction_length": 4},
    "upernet": {"backbone_config": {**RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    "vitmatte": {"fusion_hidden_sizes": [16, 16, 16, 16]},
}

LAYERS = re.compile(
    r"(^|_)(num|n)_(\w+_)?(layers?|blocks)$|(^|_)depth$|(encoder|decoder|attention|text|audio|mapping)_layers$|^layers$"
)
DEPTHS = {"depths", "num_blocks", "stage_num_blocks", "layers_per_stage", "block_repeats", "num_block_repeats"}
PERIODS = re.compile(r"period$|first_k_dense|^decoder_sparse_step$|offset$|interval$")
EXPERTS = re.compile(r"(^|_)(num|n)_(\w+_)?experts$|experts?_num$")
CHOSEN = re.compile(r"experts_per_tok|^(moe_)?top_?k$|experts_per_token")
CODES = re.compile(r"codebook_size|codevectors|^bins$|num_embeddings$")
CODEBOOKS = re.compile(r"num_quantizers|^n_q$|num_code(books|_groups)|n_codebooks|semantic_quantizers")
VOCABULARY = re.compile(r"vocab_size|_embeddings_size$|^cardinality$|_vocab$")
POSITIONS = re.compile(r"position|n_ctx|max_\w*(length|len)$|context_length|block_size")
INDICES = re.compile(r"_index(es)?$|_indices$|_idxs?$|feature_layers?$")
TOKENS = re.compile(r"_ids?$|token_index$|^(pad|bos|eos)")
IMAGES = re.compile(r"image_size|input_size|img_size|image_resolution")
FEED_FORWARD = re.compile(r"inter|ff|adapter")
MAMBA_HEADS = re.compile(r"mamba_(n|num)_heads$")
KV_HEADS = re.compile(r"(key_value|kv|num_key|global_key|linear_key)\w*heads$")
HEADS = re.compile(r"heads?(_per_(layer|stage))?$")
HEAD_SIZE = re.compile(r"head_dim$|^d_kv$|dim_head$|head_size$|^key_length$|d_head$")
WIDTHS = re.compile(
    r"size|dim|channels?|width|d_model|d_ff|n_embd|n_inner|rank|features?|filters|embed|hidden|inner|ffn|proj|latent|planes"
)
NOT_WIDTHS = re.compile(
    r"patch|window|kernel|stride|ratio|chunk|batch|crop|pool|type_|num_|grid|merge|group|bucket|_factor|time|temporal|tile"
    r"|buffer|downsample|_layers?|index|local|token"
)


def primary_class(model_type: str) -> type[PreTrainedModel] | None:
    """The class with a head that transformers maps a model type to, first of all for causal language models.

    Types without a head have their base model, and types in no mapping the first model class that takes their config.
    """
    config = CONFIG_MAPPING[model_type]
    mapped = [
        getattr(transformers, name)
        for names in _mappings()
        for name in _names(names.get(model_type))
        if hasattr(transformers, name)
    ]
    own = [cls for cls in mapped if cls.config_class is config]
    return next(iter(own or mapped or _defined_for(config)), None)


def model_types() -> list[str]:
    """All model types, in order."""
    return sorted(CONFIG_MAPPING.keys())


def small_config(model_type: str, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """A config of the model type, as small as these rules make it; it builds `cls`.

    Raises:
        Exception: What building the last attempt has raised, if none builds.
    """
    config_class = CONFIG_MAPPING[model_type]
    given = GIVEN.get(model_type, {})
    default = config_class(**given)
    given = _merged(_lacking(default), given)
    default = config_class(**given)
    best: tuple[int, PreTrainedConfig] | None = None
    failure: Exception | None = None
    for attempt, rule in enumerate(_rules()):
        if best is not None and best[0] <= (SMALL if attempt < BOLD else TOLERABLE):
            break
        try:
            config = config_class(**_merged(_shrunk(default, rule), given))
            elements = sum(tensor.numel() for tensor in _skeleton(cls, config).state_dict().values())
        except Exception as error:  # noqa: BLE001 - whatever a config or a model does not like
            failure = failure or error
            continue
        if best is None or elements < best[0]:
            best = elements, config
    if best is None:
        assert failure is not None
        raise failure
    if best[0] > 10 * TOLERABLE:
        raise MemoryError(f"the smallest {cls.__name__} that these rules make has {best[0]:,} elements")
    return best[1]


def _lacking(config: PreTrainedConfig) -> dict[str, Any]:
    """What is given for the nested configs of a config."""
    found = {}
    for name, nested in vars(config).items():
        if isinstance(nested, PreTrainedConfig):
            given = _merged(_lacking(nested), GIVEN.get(nested.model_type, {}))
            if given:
                found[name] = {**given, **_type_of(nested)}
    return found


def _merged(arguments: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` and `more`, which counts where both say something, in nested configs as well."""
    nested = {
        name: _merged(arguments[name], value)
        for name, value in more.items()
        if isinstance(value, dict) and isinstance(arguments.get(name), dict)
    }
    return {**arguments, **more, **nested}


def random_model(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose every parameter and persistent buffer holds other random values than all the rest."""
    model = cls._from_config(_taken(cls, config)).eval()
    return fill(model)


def fill(model: PreTrainedModel) -> PreTrainedModel:
    """Fill every parameter and persistent buffer of a model, each from a seed made of its name."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                continue
            generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16))
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32))
            elif tensor.dtype != torch.bool:
                tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))
            else:
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))
    return model


def _mappings() -> list[Mapping[str, Any]]:
    """Transformers' mappings of model types to class names: causal language models first, base models last."""
    names = [name for name in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_NAMES", name)]
    names.sort(key=lambda name: name != "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return [getattr(modeling_auto, name) for name in [*names, "MODEL_MAPPING_NAMES"]]


def _names(entry: str | Sequence[str] | None) -> list[str]:
    return [] if entry is None else [entry] if isinstance(entry, str) else list(entry)


def _defined_for(config: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    package = importlib.import_module(config.__module__.rpartition(".")[0])
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("modeling_"):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            for cls in vars(module).values():
                if (
                    inspect.isclass(cls)
                    and issubclass(cls, PreTrainedModel)
                    and cls.__module__ == module.__name__
                    and getattr(cls, "config_class", None) is config
                    and not cls.__name__.endswith("PreTrainedModel")
                ):
                    yield cls


def _taken(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that a class takes, as Auto classes choose it."""
    if isinstance(config, cls.config_class):
        return config
    text = config.get_text_config()
    return text if isinstance(text, cls.config_class) else config


def _skeleton(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cls._from_config(_taken(cls, config))


def _rules() -> Iterator[Callable[[str, int], int]]:
    """Ways to make the numbers of a config smaller, from the boldest on: later ones leave more as it is."""
    yield lambda name, n: _smaller(name, n, _tiny, image=64)
    yield lambda name, n: _smaller(name, n, _tiny, image=10**6)
    yield lambda name, n: _smaller(name, n, _tiny, image=10**6, layers=4)
    yield lambda name, n: n if HEAD_SIZE.search(name) else _smaller(name, n, _tiny, image=10**6)
    yield lambda name, n: min(n, 4) if KV_HEADS.search(name) else _smaller(name, n, _tiny, image=10**6)
    yield lambda name, n: min(n, 32) if FEED_FORWARD.search(name) else _smaller(name, n, _tiny, image=10**6)
    for by, heads in ((32, 8), (16, 4), (8, 4), (4, 2), (4, 1)):
        for image in (64, 10**6):
            yield lambda name, n, by=by, heads=heads, image=image: _smaller(name, n, _divided(by, heads), image=image)
    yield lambda name, n: _divided(8, 4)(name, n)
    yield lambda name, n: _smaller(name, n, lambda _, n: n, image=10**6)
    yield lambda name, n: n


def _smaller(name: str, n: int, width: Callable[[str, int], int], *, image: int, layers: int = 2) -> int:
    if LAYERS.search(name):
        return min(n, layers)
    if name in DEPTHS or PERIODS.search(name):
        return min(n, 1 if "period" not in name else 2)
    if INDICES.search(name) and n != 0:
        return max(-layers, min(n, layers - 1)) if not TOKENS.search(name) else min(n, 7)
    for pattern, limit in (
        (TOKENS, 7),
        (EXPERTS, 4),
        (CHOSEN, 2),
        (CODES, 64),
        (CODEBOOKS, 4),
        (VOCABULARY, 99),
        (POSITIONS, 64),
        (IMAGES, image),
    ):
        if pattern.search(name):
            return min(n, limit)
    return width(name, n)


def _tiny(name: str, n: int) -> int:
    for pattern, limit in ((HEAD_SIZE, 8), (MAMBA_HEADS, 8), (KV_HEADS, 2), (HEADS, 4)):
        if pattern.search(name):
            return min(limit, 2 ** (max(n, 1).bit_length() - 1))
    if "filters" in name or "groups" in name:
        return min(n, 4)
    if WIDTHS.search(name) and not NOT_WIDTHS.search(name):
        return min(n, 48 if FEED_FORWARD.search(name) else 32)
    return n


def _divided(by: int, heads: int) -> Callable[[str, int], int]:
    def smaller(name: str, n: int) -> int:
        if HEAD_SIZE.search(name):
            return max(1, n * heads // by) if n >= 16 else n
        if HEADS.search(name):
            return max(1, n // heads)
        if WIDTHS.search(name) and not NOT_WIDTHS.search(name):
            return max(4, n // by) if n >= 32 else n
        return n

    return smaller


def _shrunk(config: PreTrainedConfig, rule: Callable[[str, int], int]) -> dict[str, Any]:
    """The arguments that make a smaller config than `config`."""
    changed: dict[str, Any] = {}
    attributes = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    depths = {value: rule(name, value) for name, value in attributes.items() if _is_int(value) and LAYERS.search(name)}
    for name, value in attributes.items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = {**_shrunk(value, rule), **_type_of(value)}
            continue
        smaller = value
        if isinstance(value, (list, tuple)) and len(value) in depths and len(value) > 2 and "depths" not in attributes:
            # One entry for each layer: of every kind of layer as many as there is room for.
            kinds = [item for place, item in enumerate(value) if item not in value[:place]]
            smaller = type(value)((kinds * depths[len(value)])[: depths[len(value)]])
        smaller = _each(smaller, lambda n, name=name: rule(name, n))
        if smaller != value:
            changed[name] = smaller
    return changed


def _type_of(config: PreTrainedConfig) -> dict[str, str]:
    return {"model_type": config.model_type} if config.model_type else {}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _each(value: Any, smaller: Callable[[int], int]) -> Any:
    """`smaller` of a number, or of each in a (nested) list of numbers; anything else as it is."""
    if _is_int(value):
        return smaller(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, smaller) for item in value)
    return value
