"""Named tensors to save and load: every dtype of the format, odd names, odd shapes."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from hypothesis import strategies as st

from hf_stream.formats.dtypes import NAMES

DTYPES = list(NAMES)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes, NaNs and all; booleans stay 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    flat = torch.randint(0, top, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape) if flat.numel() else torch.empty(shape, dtype=dtype)


@st.composite
def named_tensors(draw: st.DrawFn, min_side: int = 0, min_size: int = 0, max_size: int = 8) -> dict[str, torch.Tensor]:
    """Some of the tensors are transposed, and so not contiguous."""
    tensors = {}
    for name in draw(st.lists(names, min_size=min_size, max_size=max_size, unique=True)):
        shape = tuple(draw(st.lists(st.integers(min_side, 5), max_size=3)))
        # A scalar of four bits fills no byte.
        dtype = draw(st.sampled_from([d for d in DTYPES if shape or d != torch.float4_e2m1fn_x2]))
        tensor = random_bits(shape, dtype, draw(st.integers(0, 2**32)))
        if len(shape) > 1 and dtype != torch.float4_e2m1fn_x2 and draw(st.booleans()):
            tensor = tensor.transpose(0, 1)
        tensors[name] = tensor
    return tensors


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file under a directory, hidden ones too, by its name relative to it."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one to the last bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)
