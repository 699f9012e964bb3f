"""The element types a safetensors file can hold, the torch type of each, and what people call them."""

from __future__ import annotations

from typing import Any, Final

import torch

from hf_stream.errors import ArgumentError, ArgumentTypeError

# From the smallest alignment to the largest: the order in which the format ranks them. The six-bit floats have no torch
# type: files that hold them can be read and copied, but not turned into tensors.
_TABLE: Final[tuple[tuple[str, int, torch.dtype | None], ...]] = (
    ("BOOL", 8, torch.bool),
    ("F4", 4, torch.float4_e2m1fn_x2),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("U8", 8, torch.uint8),
    ("I8", 8, torch.int8),
    ("F8_E5M2", 8, torch.float8_e5m2),
    ("F8_E4M3", 8, torch.float8_e4m3fn),
    ("F8_E8M0", 8, torch.float8_e8m0fnu),
    ("F8_E4M3FNUZ", 8, torch.float8_e4m3fnuz),
    ("F8_E5M2FNUZ", 8, torch.float8_e5m2fnuz),
    ("I16", 16, torch.int16),
    ("U16", 16, torch.uint16),
    ("F16", 16, torch.float16),
    ("BF16", 16, torch.bfloat16),
    ("I32", 32, torch.int32),
    ("U32", 32, torch.uint32),
    ("F32", 32, torch.float32),
    ("C64", 64, torch.complex64),
    ("F64", 64, torch.float64),
    ("I64", 64, torch.int64),
    ("U64", 64, torch.uint64),
)

BITS: Final[dict[str, int]] = {name: bits for name, bits, _ in _TABLE}
RANK: Final[dict[str, int]] = {name: rank for rank, (name, _, _) in enumerate(_TABLE)}
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: dtype for name, _, dtype in _TABLE if dtype is not None}
NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# Torch has no casts to float4, and e8m0 has neither signs nor anything between powers of two.
CAST_TARGETS: Final[frozenset[torch.dtype]] = frozenset(
    dtype for name, dtype in TORCH_DTYPES.items() if dtype.is_floating_point and name not in ("F4", "F8_E8M0")
)

_SHORT: Final[dict[str, torch.dtype]] = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
}
BY_NAME: Final[dict[str, torch.dtype]] = {
    **{name.lower(): dtype for name, dtype in TORCH_DTYPES.items()},
    **{str(dtype).removeprefix("torch."): dtype for dtype in NAMES},
    **_SHORT,
}


def as_dtype(dtype: Any, argument: str = "dtype") -> torch.dtype:
    """The dtype that is meant: one of torch's, or its name, such as "bfloat16", "bf16" or "torch.bfloat16".

    Args:
        dtype: The dtype or its name.
        argument: What it is called, for errors.

    Raises:
        ArgumentError: The name is not known.
        ArgumentTypeError: It is neither.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        name = dtype.lower().removeprefix("torch.")
        if name in BY_NAME:
            return BY_NAME[name]
        raise ArgumentError(
            f"{argument}= is '{dtype}', which is no name of a type; pass 'bf16', 'fp16', 'fp32', or another name that "
            "torch or safetensors have for one"
        )
    remedy = "one of torch's, such as torch.bfloat16, or its name"
    of_numpy = getattr(dtype, "__name__", getattr(dtype, "name", None))
    if "numpy" in (getattr(dtype, "__module__", ""), type(dtype).__module__.partition(".")[0]) and of_numpy in BY_NAME:
        remedy = f"torch.{of_numpy}"
    raise ArgumentTypeError(f"{argument}= is {dtype!r:.100} and no dtype of torch; pass {remedy}")
