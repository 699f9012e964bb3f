"""Read sizes from a model's config, whatever its family calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_stream.errors import LayoutError

_BLOCKS = (128, 128)
# Methods that call a scale `weight_scale`, and not `weight_scale_inv`.
_SCALES_OF_OTHERS = ("compressed-tensors", "fbgemm_fp8", "modelopt")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def config_size(config: object, *names: str) -> int | None:
    """The first whole number that `config`, or else its `text_config`, has under one of `names`.

        >>> config_size({"text_config": {"num_attention_heads": 32}}, "n_head", "num_attention_heads")
        32

    Args:
        config: Any object with attributes, or a dict as in config.json; None has nothing.
        names: The names by which families of models know the size.
    """
    for part in (config, _get(config, "text_config")):
        for name in names:
            value = _get(part, name)
            if isinstance(value, int):
                return value
    return None


def attention_heads(config: object, num_heads: int | None, num_key_value_heads: int | None) -> tuple[int, int] | None:
    """Numbers of query heads and of key (equally value) heads, or None where nobody tells.

    Args:
        config: See `config_size`.
        num_heads: Overrides the config.
        num_key_value_heads: Overrides the config; by default as many as query heads.

    Raises:
        LayoutError: the query heads cannot be shared out evenly among the key heads.
    """
    heads, kv_heads = known_heads(config, num_heads, num_key_value_heads)
    if heads is None:
        if num_key_value_heads is not None:
            raise LayoutError(f"num_key_value_heads={num_key_value_heads} needs num_heads as well. Pass num_heads=.")
        return None
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise LayoutError(
            f"{heads} query heads cannot share {kv_heads} key heads evenly. Check num_heads and num_key_value_heads."
        )
    return heads, kv_heads


def known_heads(
    config: object, num_heads: int | None, num_key_value_heads: int | None
) -> tuple[int | None, int | None]:
    """Numbers of query heads and of key heads as far as they are told; arguments override the config."""
    return num_heads or config_size(config, *_HEADS), num_key_value_heads or _kv_heads(config)


def _kv_heads(config: object) -> int | None:
    # Falcon and GPT-BigCode say by a flag that there is one, whatever number stands beside it.
    for part in (config, _get(config, "text_config")):
        if _get(part, "multi_query") is True and not _get(part, "new_decoder_architecture"):
            return 1
    return config_size(config, *_KV_HEADS)


def parts_with_heads(config: object) -> list[str]:
    """Names of the configs inside `config` that have attention heads of their own: several in multimodal models."""
    entries = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return [name for name, part in entries.items() if name.endswith("_config") and config_size(part, *_HEADS)]


def fp8_scales(config: object) -> tuple[tuple[int, int] | None, str]:
    """What the config's `quantization_config` says of the scales of FP8 weights.

    >>> fp8_scales({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}})
    ((64, 128), '_scale_inv')
    >>> fp8_scales({"quantization_config": {"quant_method": "compressed-tensors"}})
    ((128, 128), '_scale')

    Returns:
        Rows and columns of a block (None: of any size), and what a scale's name has after its weight's.
    """
    for part in (config, _get(config, "text_config")):
        quantization = _get(part, "quantization_config") or _get(part, "compression_config")
        if quantization is not None:
            content = quantization if isinstance(quantization, Mapping) else vars(quantization)
            size = _block_structure(content) or content.get("weight_block_size", _BLOCKS)
            suffix = "_scale" if content.get("quant_method") in _SCALES_OF_OTHERS else "_scale_inv"
            return (size[0], size[1]) if size else None, suffix
    return _BLOCKS, "_scale_inv"


def _block_structure(quantization: Mapping[str, object]) -> Sequence[int] | None:
    """The blocks of compressed-tensors, which has them in the first group of layers that is in blocks."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        size = _get(_get(group, "weights"), "block_structure")
        if isinstance(size, (list, tuple)) and len(size) == 2:
            return size
    return None


def _get(config: object, name: str) -> object:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
