"""What weight files are called, and what those are called that are made of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

from hf_stream.formats.shards import SAFE_WEIGHTS, add_variant

KINDS: Final = ("model", "adapter_model", "diffusion_pytorch_model")
"""What transformers, PEFT and diffusers look for, before a variant (".fp16"), a shard's number and an ending."""

_SAFE: Final = ".safetensors"
_NUMBER: Final = re.compile(r"-\d{5}-of-\d{5}(?=\.)")


def kept_name(files: Iterable[str], *, any_name: bool = False) -> str:
    """The name, without numbers of shards, of the safetensors file that these files become.

    >>> kept_name(["adapter_model.bin"])
    'adapter_model.safetensors'
    >>> kept_name(["pytorch_model.fp16-00001-of-00002.bin", "pytorch_model.fp16-00002-of-00002.bin"])
    'model.fp16.safetensors'
    >>> kept_name(["weights.safetensors"]), kept_name(["weights.safetensors"], any_name=True)
    ('model.safetensors', 'weights.safetensors')

    Args:
        files: Names of all files of one checkpoint.
        any_name: Whether names that no library looks for are kept too.
    """
    names = {_NUMBER.sub("", os.path.basename(file)) for file in files}
    stem, ending = os.path.splitext(names.pop()) if len(names) == 1 else ("", "")
    if ending == ".bin":
        stem = re.sub(r"^pytorch_(?=model)", "", stem)
    if (ending in (_SAFE, ".bin") and is_known(stem)) or (ending == _SAFE and any_name):
        return stem + _SAFE
    return SAFE_WEIGHTS


def is_known(name: str) -> bool:
    """Whether libraries look for a file of this name."""
    return name.partition(".")[0] in KINDS


def kind_of(name: str) -> str:
    """Which of the kinds a file, or an index, without a number is; "model" where none says otherwise.

    >>> kind_of("diffusion_pytorch_model.fp16.safetensors"), kind_of("pytorch_model.bin"), kind_of("weights.bin")
    ('diffusion_pytorch_model', 'model', 'model')
    """
    stem = name.partition(".")[0]
    return stem if stem in KINDS else KINDS[0]


def bin_stem(kind: str) -> str:
    """What files of torch.save of a kind are called before their ending."""
    return f"pytorch_{kind}" if kind == KINDS[0] else kind


def index_name(name: str) -> str:
    """The index of the shards of a safetensors file.

    >>> index_name("model.fp16.safetensors"), index_name("v1.5.safetensors")
    ('model.safetensors.index.fp16.json', 'v1.5.safetensors.index.json')
    """
    kind, _, variant = name.removesuffix(_SAFE).partition(".")
    if variant and kind in KINDS:
        return add_variant(f"{kind}{_SAFE}.index.json", variant)
    return f"{name}.index.json"
