"""Paths as users give them: an empty one, from a variable that is not set, is no name of the current directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_stream.errors import ArgumentTypeError, CheckpointError
from hf_stream.lazy.given import kind


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
