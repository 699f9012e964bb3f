"""Stream checkpoints from any layout to any other, one bounded buffer at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_stream import layouts
from hf_stream.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Conversion,
    Difference,
    Differences,
    convert,
    load_into,
    open_checkpoint,
    plan_conversion,
    save_checkpoint,
    verify,
)
from hf_stream.errors import CheckpointError, CopyError, FormatError, HfStreamError, LayoutError, LazyTensorError
from hf_stream.layouts import Layout
from hf_stream.lazy import LazyTensor, materialize

if TYPE_CHECKING:
    from hf_stream.integrations.transformers import StreamingMixin, from_pretrained, save_pretrained

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWriter",
    "Conversion",
    "CopyError",
    "Difference",
    "Differences",
    "FormatError",
    "HfStreamError",
    "Layout",
    "LayoutError",
    "LazyTensor",
    "LazyTensorError",
    "StreamingMixin",
    "convert",
    "from_pretrained",
    "layouts",
    "load_into",
    "materialize",
    "open_checkpoint",
    "plan_conversion",
    "save_checkpoint",
    "save_pretrained",
    "verify",
]

# Importing transformers takes seconds; those who only touch checkpoints need not wait for it.
_FROM_TRANSFORMERS = frozenset({"StreamingMixin", "from_pretrained", "save_pretrained"})


def __getattr__(name: str) -> Any:
    if name in _FROM_TRANSFORMERS:
        from hf_stream.integrations import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module 'hf_stream' has no attribute '{name}'")
