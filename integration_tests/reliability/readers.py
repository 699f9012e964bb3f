"""What plain readers, and ours, make of a directory: a digest of all they read, or an error."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import hf_stream

# Gives a digest of what is read, or raises an error.
Reader = Callable[[Path], str]


def opened(path: Path) -> str:
    """As `hf_stream.open_checkpoint` reads it."""
    return digest({name: tensor.materialize() for name, tensor in hf_stream.open_checkpoint(path).items()})


def nested(path: Path) -> str:
    """As `hf_stream.load_nested` reads it."""
    return digest(_flat(hf_stream.load_nested(path)))


def transformers(path: Path) -> str:
    """As plain transformers reads it: the config and the weights, which belong together.

    A class of one architecture takes its default config where none is there, of many gigabytes; the Auto class refuses.
    """
    from transformers import AutoModelForCausalLM

    if not path.is_dir():
        raise FileNotFoundError(path)  # it would ask the Hub for it
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, local_files_only=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        raise OSError(f"it lacks weights, and says so: {sorted(info['missing_keys'])[:3]}")
    return digest(model.state_dict(), {"initializer_range": model.config.initializer_range})


def adapter(path: Path) -> str:
    """As plain peft reads it: the config and the weights."""
    import peft

    config = peft.LoraConfig.from_pretrained(path)
    return digest(peft.load_peft_weights(str(path), device="cpu"), {"r": config.r})


def read(reader: Reader, path: Path) -> str | None:
    """The digest of what is read, None for an error: ours in words, others as they come."""
    try:
        return reader(path)
    except (OSError, hf_stream.HfStreamError):
        return None
    except Exception as error:
        if is_ours(error):
            raise
        return None


def is_ours(error: Exception) -> bool:
    """Whether our own code raised an error, or what it called of Python's own library, and not another library."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    of_python = (sysconfig.get_path("stdlib") + "/", "<frozen ")
    last = next(file for file in reversed(files) if "site-packages" in file or not file.startswith(of_python))
    return last.startswith(os.path.dirname(hf_stream.__file__) + "/")


def digest(tensors: Mapping[str, torch.Tensor], more: Any = None) -> str:
    """A digest of tensors, by name, and of something that JSON can hold."""
    state = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        state.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else repr(tensor.item()).encode())
    state.update(json.dumps(more).encode())
    return state.hexdigest()


def _flat(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for n, inner in enumerate(value) for k, v in _flat(inner, f"{path}/{n}").items()}
    return {path: value if isinstance(value, torch.Tensor) else torch.tensor(value)}
