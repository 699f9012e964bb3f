"""Paths as users give them: an empty one is no name of the current directory, and one of a file is no directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_stream.errors import ArgumentTypeError, CheckpointError
from hf_stream.lazy.given import kind

_SUFFIX = ".safetensors"


def given_path(path: Any) -> Path:
    """The path that a user named: text, or what has a path of text.

    Raises:
        ArgumentTypeError: It is something else.
        CheckpointError: It is empty. `Path("")` would lead to whatever lies in the current directory, and replace it.
    """
    if not isinstance(path, str | os.PathLike):
        remedy = "its tensors are there already" if isinstance(path, Mapping) else "pass text or a pathlib.Path"
        raise ArgumentTypeError(f"a path is wanted, got {kind(path)}; {remedy}")
    if not os.fspath(path):
        raise CheckpointError("the path is empty; is a variable not set? Write '.' for the current directory")
    return Path(path)


def place_of(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """The directory to write into, and the name of the one file to write there if the path ends in .safetensors.

    Raises:
        CheckpointError: The path is empty.
    """
    place = given_path(path)
    return (place.parent, place.name) if place.suffix == _SUFFIX else (place, None)
