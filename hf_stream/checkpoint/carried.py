"""The small files beside a checkpoint's weights: config, tokenizer and others, which go along in a conversion."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_stream.checkpoint.staging import Staging
from hf_stream.errors import CheckpointError, HfStreamError
from hf_stream.formats import is_weight_file
from hf_stream.formats.regular_files import read_json_object, read_small

_CONFIG = "config.json"
LAYOUT_RECORD = "hf_stream.json"
"""Says which layout the weights beside it are in, as the Trainer callback saves them."""

NewConfig = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def find_carried(directory: Path, *, same_layout: bool = True) -> Iterator[Path]:
    """Every file under `directory` but weights, their indices, what is hidden, and what holds for another layout."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name == LAYOUT_RECORD and not same_layout:
                continue
            # Not a pipe or a socket, which could be read forever, nor a link to nowhere.
            if not name.startswith(".") and not is_weight_file(name) and path.is_file():
                yield path


def read_config(directory: Path) -> dict[str, Any] | None:
    """The content of the config.json in a directory; None if there is none.

    Raises:
        CheckpointError: It is not JSON.
    """
    path = directory / _CONFIG
    return read_json_object(path) if path.is_file() else None


def left_behind(directory: Path, read: Iterable[str]) -> list[str]:
    """Weights under `directory` that are neither read nor carried: other formats, and those in other folders."""
    known = {os.path.realpath(path) for path in read}
    return [
        os.path.relpath(path, directory)
        for path in sorted(directory.rglob("*"))
        if is_weight_file(path.name) and path.suffix != ".json" and os.path.realpath(path) not in known
    ]


def carry(staging: Staging, directory: Path, files: Iterable[Path], new_configs: Mapping[str, NewConfig]) -> None:
    """Stage files of `directory`.

    Args:
        staging: Where to.
        directory: Where from.
        files: Which.
        new_configs: What becomes of the config.json in a folder, "" being the directory itself.

    Raises:
        CheckpointError: There is no room, or a config is not JSON.
    """
    for path in files:
        name = os.path.relpath(path, directory)
        new_config = new_configs.get(os.path.dirname(name)) if path.name == _CONFIG else None
        changed = None if new_config is None else _changed(path, new_config)
        if changed is not None:
            staging.write(name, changed)
        elif not Path(os.path.realpath(path.parent)).is_relative_to(staging.directory):
            # A destination inside the source does not go into itself.
            staging.copy(name, path)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A transformers config that says what the dtype of the weights is, under its new or its old name, at any depth."""
    text = str(dtype).removeprefix("torch.")
    changed = dict(config)
    for key, entry in config.items():
        if key in ("dtype", "torch_dtype"):
            changed[key] = text
        elif key.endswith("_config") and key != "quantization_config" and isinstance(entry, dict):
            changed[key] = with_dtype(entry, dtype)
    return changed


def _changed(path: Path, new_config: NewConfig) -> bytes | None:
    """The new content of a config, or None if it stays as it is."""
    try:
        config = json.loads(read_small(path))
        changed = new_config(config) if isinstance(config, dict) else config
        if changed == config:
            return None
        return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, HfStreamError):
            raise
        raise CheckpointError(f"'{path}' is not JSON ({error}); correct it, or move it away") from None
