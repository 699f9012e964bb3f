"""Stream checkpoints from any layout to any other, one bounded buffer at a time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.models.auto import *  # noqa: F403

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
    from hf_stream.integrations.trainer import StreamingCheckpointCallback
    from hf_stream.integrations.transformers import (
        StreamingMixin,
        disable,
        enable,
        from_pretrained,
        save_pretrained,
        streaming,
    )
    from hf_stream.layouts import Layout
    from hf_stream.lazy import LazyTensor, materialize

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

# Importing torch takes seconds, and transformers takes more. Each is imported with the first name that needs it: the
# command line's help and completion need neither, and those who only touch checkpoints do not need transformers.
_HOMES = {
    "errors": (
        "CheckpointError",
        "CopyError",
        "FormatError",
        "HfStreamError",
        "LayoutError",
        "LazyTensorError",
    ),
    "lazy": ("LazyTensor", "materialize"),
    "checkpoint": (
        "Checkpoint",
        "CheckpointWriter",
        "Conversion",
        "Difference",
        "Differences",
        "convert",
        "load_into",
        "load_nested",
        "open_checkpoint",
        "open_nested",
        "plan_conversion",
        "save_checkpoint",
        "save_nested",
        "verify",
    ),
    "layouts": ("Layout",),
    "integrations.transformers": (
        "StreamingMixin",
        "disable",
        "enable",
        "from_pretrained",
        "save_pretrained",
        "streaming",
    ),
    "integrations.trainer": ("StreamingCheckpointCallback",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_FOLDERS = frozenset({"checkpoint", "copying", "errors", "formats", "integrations", "layouts", "lazy", "storage"})

# Type checkers see the names above, and tell one that is nowhere.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A public name, a folder, or an Auto class of transformers."""
        if name in _FOLDERS:
            return import_module(f"hf_stream.{name}")
        if name in _HOME_OF:
            value = globals()[name] = getattr(import_module(f"hf_stream.{_HOME_OF[name]}"), name)
            return value
        if name.startswith("Auto"):
            from hf_stream.integrations.transformers.auto import auto_class, auto_names

            if name in auto_names():
                return auto_class(name)
        raise AttributeError(f"module 'hf_stream' has no attribute '{name}'")


def __dir__() -> list[str]:
    from hf_stream.integrations.transformers.auto import auto_names

    return sorted({*globals(), *__all__, *auto_names()})
