"""The element types a safetensors file can hold, and the torch type of each."""

from __future__ import annotations

from typing import Final

import torch

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
