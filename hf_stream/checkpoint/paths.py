"""Paths as users give them: an empty one, from a variable that is not set, is no name of the current directory."""

from __future__ import annotations

import os
from pathlib import Path

from hf_stream.errors import CheckpointError


def given_path(path: str | os.PathLike[str]) -> Path:
    """The path that a user named.

    Raises:
        CheckpointError: It is empty. `Path("")` would lead to whatever lies in the current directory, and replace it.
    """
    if not os.fspath(path):
        raise CheckpointError("the path is empty; is a variable not set? Write '.' for the current directory")
    return Path(path)
