"""What `dtype=` does to a checkpoint: which types it may be."""

from __future__ import annotations

import torch

from hf_stream.errors import CheckpointError
from hf_stream.formats.dtypes import CAST_TARGETS


def check_dtype(dtype: object) -> None:
    """Refuse what weights cannot be cast to.

    Raises:
        CheckpointError: It is no dtype, or none that holds weights: 300 as int8 is 44.
    """
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype= is {dtype!r} and no dtype; pass one of torch's, such as torch.bfloat16")
    if dtype not in CAST_TARGETS:
        raise CheckpointError(
            f"dtype= is {dtype}, and weights cast to that would be lost; pass a floating-point type, such as "
            "torch.bfloat16 (to quantize a model, load it with a quantization_config of transformers, and save it)"
        )
