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
    load_nested,
    open_checkpoint,
    open_nested,
    plan_conversion,
    save_checkpoint,
    save_nested,
    verify,
)
from hf_stream.errors import CheckpointError, CopyError, FormatError, HfStreamError, LayoutError, LazyTensorError
from hf_stream.layouts import Layout
from hf_stream.lazy import LazyTensor, materialize

if TYPE_CHECKING:
    from transformers.models.auto import *  # noqa: F403

    from hf_stream.integrations.trainer import StreamingCheckpointCallback
    from hf_stream.integrations.transformers import (
        StreamingMixin,
        disable,
        enable,
        from_pretrained,
        save_pretrained,
        streaming,
    )

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
    "StreamingCheckpointCallback",
    "StreamingMixin",
    "convert",
    "disable",
    "enable",
    "from_pretrained",
    "layouts",
    "load_into",
    "load_nested",
    "materialize",
    "open_checkpoint",
    "open_nested",
    "plan_conversion",
    "save_checkpoint",
    "save_nested",
    "save_pretrained",
    "streaming",
    "verify",
]

# Importing transformers takes seconds; those who only touch checkpoints need not wait for it.
_FROM_TRANSFORMERS = frozenset(
    {"StreamingMixin", "disable", "enable", "from_pretrained", "save_pretrained", "streaming"}
)

# Type checkers see the names above, and tell one that is nowhere.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """What needs transformers, its Auto classes included."""
        if name in _FROM_TRANSFORMERS:
            from hf_stream.integrations import transformers

            return getattr(transformers, name)
        if name == "StreamingCheckpointCallback":
            from hf_stream.integrations import trainer

            return trainer.StreamingCheckpointCallback
        if name.startswith("Auto"):
            from hf_stream.integrations.transformers.auto import auto_class, auto_names

            if name in auto_names():
                return auto_class(name)
        raise AttributeError(f"module 'hf_stream' has no attribute '{name}'")


def __dir__() -> list[str]:
    from hf_stream.integrations.transformers.auto import auto_names

    return sorted({*globals(), *__all__, *auto_names()})
