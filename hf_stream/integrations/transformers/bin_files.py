"""Files of torch.save as `from_pretrained` meets them: opened without loading, and never unpickled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import modeling_utils

from hf_stream.checkpoint.torch_nesting import open_torch_file
from hf_stream.checkpoint.weight_files import TORCH_SUFFIXES
from hf_stream.errors import CheckpointError
from hf_stream.integrations.transformers.hooks import current_request


def is_bin_file(file: str | os.PathLike[str]) -> bool:
    """Whether a file is one of torch.save, by its name."""
    return os.fspath(file).endswith(TORCH_SUFFIXES)


def bin_state(file: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What the file holds, with its tensors' values as lazies; it may hold more than tensors.

    Raises:
        FormatError, CheckpointError: It cannot be used.
    """
    state = open_torch_file(file)
    if not isinstance(state, dict):
        raise CheckpointError(f"'{file}' holds no dict of tensors by name, but a {type(state).__name__}")
    return {name: entry.detach() if isinstance(entry, torch.Tensor) else entry for name, entry in state.items()}


@contextmanager
def dtypes_read_here() -> Iterator[None]:
    """Run a block in which streamed loads also look up the dtype of a file of torch.save without torch.

    With dtype="auto" and a config that has none, transformers asks torch for the tensors on the meta device. That would
    execute the pickle under weights_only=False, and end the process for a file marked as big-endian.
    """
    plain = modeling_utils.load_state_dict

    def load_state_dict(checkpoint_file: Any, map_location: Any = "cpu", **kwargs: Any) -> Any:
        if map_location == "meta" and is_bin_file(checkpoint_file) and current_request() is not None:
            return bin_state(checkpoint_file)
        return plain(checkpoint_file, map_location=map_location, **kwargs)

    modeling_utils.load_state_dict = load_state_dict  # type: ignore[assignment]
    try:
        yield
    finally:
        # Whoever has put something over the hook meanwhile keeps it; it calls the plain function through the hook.
        if modeling_utils.load_state_dict is load_state_dict:
            modeling_utils.load_state_dict = plain
