"""What `dtype=` does to a checkpoint: which types it may be."""

from __future__ import annotations

import torch

from hf_stream.errors import ArgumentError
from hf_stream.formats.dtypes import CAST_TARGETS, as_dtype


def cast_target(dtype: torch.dtype | str) -> torch.dtype:
    """What weights are cast to, by the type or its name; refuses what they cannot be cast to.

    Raises:
        ArgumentError: It holds no weights: 300 as int8 is 44. Or it is a name that is not known.
        ArgumentTypeError: It is neither a dtype nor a name.
    """
    dtype = as_dtype(dtype)
    if dtype not in CAST_TARGETS:
        raise ArgumentError(
            f"dtype= is {dtype}, and weights cast to that would be lost; pass a floating-point type, such as "
            "torch.bfloat16 (to quantize a model, load it with a quantization_config of transformers, and save it)"
        )
    return dtype
