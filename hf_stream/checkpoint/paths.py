"""Paths as users give them: an empty one is no name of the current directory, and one of a file is no directory."""

from __future__ import annotations

import os
from pathlib import Path

from hf_stream.errors import CheckpointError

_SUFFIX = ".safetensors"


def given_path(path: str | os.PathLike[str]) -> Path:
    """The path that a user named.

    Raises:
        CheckpointError: It is empty. `Path("")` would lead to whatever lies in the current directory, and replace it.
    """
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
