"""Quantized weights, known by names, dtypes and config: codes that mean nothing without the scales beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from hf_stream.errors import CheckpointError, LayoutError

# What the names of codes and of their scales end in, after what they have in common.
_PAIRS: Final = (
    ("", "_scale_inv"),  # FP8 blocks
    ("", "_scale"),  # compressed-tensors, fbgemm, ModelOpt
    ("", ".absmax"),  # bitsandbytes, 4 bits
    ("weight", "SCB"),  # bitsandbytes, 8 bits
    ("weight", "scale"),  # DeepSeek-V4
    ("weight", "qscale_weight"),  # Mistral
    ("weight", "scales"),  # MLX
    ("weight", "weight_scales"),  # EETQ
    ("qweight", "scales"),  # GPTQ, AWQ
    ("W_q", "scale"),  # HQQ
    ("_packed", "_scale"),  # compressed-tensors, less than 8 bits
    ("_blocks", "_scales"),  # MXFP4
    ("_qdata", "_scale"),  # torchao
    ("_data", "_scale"),  # quanto
)
_SCALE_ENDS: Final = tuple(end for _, end in _PAIRS)
_CONFIGS: Final = ("quantization_config", "compression_config")

Tensors = Mapping[str, torch.Tensor]


def scales_of(tensors: Tensors) -> Iterator[tuple[str, str]]:
    """The names of each scale and of the codes that it belongs to."""
    for scale in tensors:
        if not scale.endswith(_SCALE_ENDS):
            continue
        for codes_end, scale_end in _PAIRS:
            codes = scale.removesuffix(scale_end) + codes_end
            if scale.endswith(scale_end) and codes in tensors and _is_code(tensors[codes].dtype):
                yield scale, codes
                break


def check_whole(before: Tensors, after: Tensors) -> None:
    """Refuse what a layout has made of a quantized weight if it has left some of its parts as they were.

    Raises:
        LayoutError: It has; names what has changed and what has not.
    """
    for scale, codes in scales_of(before):
        if scale not in after:
            continue
        rescaled = after[scale].shape != before[scale].shape
        for part in (codes, f"{codes.rpartition('.')[0]}.bias"):
            if part not in before:
                continue
            if part not in after:
                fact = "goes elsewhere"
            elif part == codes and not _is_code(after[part].dtype):
                fact = f"becomes {after[part].dtype}"
            elif after[part].shape != before[part].shape and not rescaled:
                fact = "gets another shape"
            else:
                continue
            raise LayoutError(
                f"'{part}' {fact} in this layout, and '{scale}' stays: together they are a quantized weight; "
                f"{_way_out(codes, scale)}, or add rules that do the same to all parts of it"
            )


def check_castable(path: object, tensors: Tensors, config: Mapping[str, Any] | None, *, converted: bool) -> None:
    """Refuse to cast quantized tensors: what loads them takes codes and scales to be what the config says.

    Args:
        path: What errors call the checkpoint.
        tensors: The tensors.
        config: The content of the config.json that goes with them, if there is one.
        converted: Whether a layout has made them.

    Raises:
        CheckpointError: They are quantized; says how one knows, and what to do.
    """
    method = None if config is None else quantization_method(config)
    pair = next(scales_of(tensors), None)
    if pair is not None:
        fact, way = f"'{pair[0]}' scales '{pair[1]}'", _way_out(pair[1], pair[0])
    elif method is None:
        return
    elif converted:
        fact = f"config.json says {method} after the layout as well"
        way = "if the layout dequantizes, give it a new_config that takes quantization_config out"
    else:
        fact, way = f"config.json says {method}", _ELSEWHERE
    raise CheckpointError(
        f"'{path}' is quantized ({fact}), and dtype= would change scales or codes behind the back of its config; "
        f"{way}, or convert without dtype="
    )


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """How the weights are quantized, in a word, as a config or a config inside it says; None if they are not."""
    for key, entry in config.items():
        if not isinstance(entry, Mapping):
            continue
        if key in _CONFIGS and entry:
            return str(entry.get("quant_method") or entry.get("quant_algo") or key)
        if key.endswith("_config") and (found := quantization_method(entry)):
            return found
    return None


_ELSEWHERE: Final = "load it with transformers, dequantize it there and save that first"


def _way_out(codes: str, scale: str) -> str:
    """What to do about quantized weights, as the end of a sentence."""
    for end, argument in (("_scale_inv", ""), ("_scale", "suffix='_scale'")):
        if scale == codes + end:
            return f"dequantize it first, with dequantize_fp8_blocks({argument}) (--layout dequantize-fp8-blocks)"
    return _ELSEWHERE


def _is_code(dtype: torch.dtype) -> bool:
    """Whether numbers of a type are quantized ones where there is a scale for them."""
    if dtype.is_floating_point:
        return dtype.itemsize == 1
    return dtype != torch.bool and not dtype.is_complex
