"""A model's config, for the sizes that layouts need: beside a checkpoint, in a file that is named, or in a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from torch import nn

from hf_stream.checkpoint.paths import given_path
from hf_stream.errors import CheckpointError, LayoutError
from hf_stream.formats.regular_files import read_json_object

CONFIGS: Final = ("config.json", "params.json")
"""That of transformers, and that of Meta."""

_NO_CONFIGS: Final = (bool, int, float, complex, bytes, bytearray, list, tuple, set, frozenset, type)


def config_beside(location: Path) -> dict[str, Any] | None:
    """The content of the config in a directory, or beside a file; None if there is none.

    Raises:
        CheckpointError: It is no JSON object.
    """
    directory = location if location.is_dir() else location.parent
    path = next((directory / name for name in CONFIGS if (directory / name).exists()), None)
    return None if path is None else read_json_object(path)


def config_of(config: object) -> object:
    """A config from whatever stands for one.

    Args:
        config: A config, as an object or as a dict; a model that has one; the path of a file with one, or of its
            directory; or None, which stays what it is.

    Raises:
        CheckpointError: There is no such file, or it is no JSON object.
        LayoutError: The model has no config.
        TypeError: It is something else.
    """
    if isinstance(config, str | os.PathLike):
        path = given_path(config)
        found = read_json_object(path) if path.is_file() else config_beside(path) if path.is_dir() else None
        if found is None:
            lack = f"has no {' or '.join(CONFIGS)}" if path.is_dir() else "does not exist"
            raise CheckpointError(f"'{path}' {lack}; pass the path of a config.json, or of the directory it is in")
        return found
    if isinstance(config, nn.Module):
        own = getattr(config, "config", None)
        if own is None:
            raise LayoutError(f"{type(config).__name__} has no config to read sizes from; pass a config.")
        return own
    if isinstance(config, _NO_CONFIGS):
        raise TypeError(
            f"{config!r:.100} is no config; pass a model's config, the content or the path of a config.json, or a model"
        )
    return config
