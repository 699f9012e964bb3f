"""Layouts by name, for the command line: the ready-made ones, and those in a file of the user's."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_stream.checkpoint import AnyLayout
from hf_stream.checkpoint.config import config_of
from hf_stream.errors import ArgumentTypeError, LayoutError
from hf_stream.layouts.composable import Composable, TwoWay
from hf_stream.layouts.dequantize_fp8_blocks import dequantize_fp8_blocks
from hf_stream.layouts.from_transformers import from_transformers
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.lora_merge import merge_lora
from hf_stream.layouts.meta_llama import meta_llama
from hf_stream.layouts.metaseq_opt import metaseq_opt
from hf_stream.layouts.packed_gate_up import packed_gate_up
from hf_stream.layouts.packed_qkv import packed_qkv
from hf_stream.layouts.stacked_experts import stacked_experts
from hf_stream.layouts.swift_transformer import swift_transformer
from hf_stream.lazy.given import kind

_READY_MADE: dict[str, tuple[str, Callable[[Any], TwoWay]]] = {
    "packed-qkv": (
        "query, key and value in one projection, one after the other (Phi-3, vLLM)",
        packed_qkv,
    ),
    "packed-qkv-per-head": (
        "query, key and value in one projection, dealt by heads",
        partial(packed_qkv, style="per_head"),
    ),
    "packed-qkv-per-group": (
        "query, key and value in one projection, dealt by key heads (Megatron)",
        partial(packed_qkv, style="per_group"),
    ),
    "packed-qkv-gpt-neox": (
        "the packed projection of GPT-NeoX, attention.query_key_value",
        partial(packed_qkv, names="gpt_neox"),
    ),
    "packed-qkv-bloom": (
        "the packed projection of BLOOM, self_attention.query_key_value",
        partial(packed_qkv, names="bloom"),
    ),
    "packed-qkv-falcon": (
        "the packed projection of Falcon, self_attention.query_key_value, old and new",
        partial(packed_qkv, names="falcon"),
    ),
    "packed-gate-up": (
        "gate and up in one projection (Phi-3, vLLM)",
        lambda _config: packed_gate_up(),
    ),
    "stacked-experts": (
        "experts merged as transformers 5 holds them (Qwen, DeepSeek, GLM and others)",
        stacked_experts,
    ),
    "stacked-experts-mixtral": (
        "the same for experts with the names of Mixtral",
        partial(stacked_experts, names="mixtral"),
    ),
    "from-transformers": (
        "the tensors that the model of the config holds, as transformers converts them",
        from_transformers,
    ),
    "dequantize-fp8-blocks": (
        "FP8 weights times the scales of their blocks, as bfloat16 (DeepSeek)",
        lambda config: dequantize_fp8_blocks().with_config(config),
    ),
    "metaseq-opt": (
        "OPT of metaseq, one file or parts, as transformers has it",
        lambda _config: metaseq_opt(),
    ),
    "meta-llama": (
        "Llama of Meta, one file or parts, as transformers has it",
        meta_llama,
    ),
    "swift-transformer": (
        "OPT or Llama, of metaseq, Meta or transformers, in the 8 partitions of SwiftTransformer",
        lambda config: swift_transformer(config=config),
    ),
}


_OF_A_PATH: dict[str, tuple[str, Callable[[str, Any], TwoWay]]] = {
    "merge-lora": (
        "a LoRA adapter of PEFT folded into its base",
        lambda path, _config: merge_lora(path),
    ),
    "merge-lora-in-memory": (
        "the same for targets that have other names or shapes in memory (experts), or are tied",
        lambda path, config: merge_lora(path, layout=from_transformers(config)),
    ),
}


def names() -> dict[str, str]:
    """The names that `get` knows, each with a description of one line; PATH stands for one of the user's."""
    ready_made = {name: description for name, (description, _) in _READY_MADE.items()}
    return ready_made | {f"{name}=PATH": description for name, (description, _) in _OF_A_PATH.items()}


def takes_path(name: str) -> bool:
    """Whether this is the name of a ready-made layout, an equals sign, and a path."""
    word, equals, _ = name.partition("=")
    return bool(equals) and word.replace("_", "-") in _OF_A_PATH


def get(name: str, config: object = None) -> TwoWay:
    """A ready-made layout.

        >>> get("packed-gate-up")
        Layout([Concat(['{prefix:*}.mlp.gate_proj.{kind:weight|bias}', ...

    Args:
        name: One of `names()`; underscores are as good as dashes.
        config: The model's config, an object or a dict, its path, or the model, for sizes. Without it they are read
            where the layout is used, from the config beside the checkpoint.

    Raises:
        LayoutError: the name is not known, or the config lacks a size.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"a layout has a name, got {kind(name)}; the names are {', '.join(names())}")
    config = config_of(config)
    word, _, path = name.partition("=")
    if takes_path(name):
        return _OF_A_PATH[word.replace("_", "-")][1](path, config)
    known = name.replace("_", "-")
    if known not in _READY_MADE:
        close = difflib.get_close_matches(known, names(), n=1)
        meant = f"Did you mean '{close[0]}'? " if close else ""
        raise LayoutError(f"layout '{name}' is not known. {meant}Known are: {', '.join(names())}.")
    return _READY_MADE[known][1](config)


def load(spec: str, config: object = None) -> AnyLayout:
    """A layout from a Python file, which is executed.

    The name may stand for

    - a `Layout`, or another layout that has an inverse;
    - a function with a parameter called `config`: it is called with the config and returns the layout;
    - any other function (or callable object): it is the layout, and takes and returns a mapping of named tensors.

    Args:
        spec: `path/to/file.py:name`.
        config: The model's config, an object or a dict, its path, or the model.

    Raises:
        LayoutError: there is no such file or name, the file raises an error, or the name stands for something else.
    """
    if not isinstance(spec, str):
        raise ArgumentTypeError(f"a layout of yours is written as 'path/to/file.py:name', got {kind(spec)}")
    path_text, colon, name = spec.rpartition(":")
    if not colon or not path_text.endswith(".py"):
        raise LayoutError(f"layout '{spec}' is not written as path/to/file.py:name.")
    module = _run_file(Path(path_text))
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if not key.startswith("_") and callable(value)]
        raise LayoutError(f"'{path_text}' has no '{name}'. It has: {', '.join(known) or 'no callable'}.")
    if callable(found) and not isinstance(found, (Layout, Composable)) and _takes_config(found):
        found = found(config=config_of(config))
    if not callable(found):
        raise LayoutError(f"'{spec}' must be a Layout or a function, got {type(found).__name__}.")
    layout: AnyLayout = found
    return layout


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LayoutError(f"'{path}' is not a file. A layout of yours is written as path/to/file.py:name.")
    module = ModuleType(f"hf_stream_layout_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # a dataclass looks up its module there
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:  # a script that ends itself must not end its caller
        raise LayoutError(f"'{path}' failed: {type(error).__name__}: {error}") from error
    return module


def _takes_config(function: Callable[..., object]) -> bool:
    try:
        return "config" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
