"""A layout as checkpoints see it: anything callable from named tensors to named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from hf_stream.errors import LayoutError

AnyLayout: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def apply_layout(layout: AnyLayout | None, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as the layout names and shapes them; without one, as they are.

    Raises:
        LayoutError: The layout does not fit, or gives something else than named tensors.
    """
    if layout is None:
        return dict(tensors)
    result = layout(tensors)
    if not isinstance(result, Mapping):
        raise LayoutError(f"a layout must return a mapping of names to tensors, got {type(result).__name__}")
    for name, tensor in result.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"a layout must return names and tensors, got {name!r}: {type(tensor).__name__}")
    return dict(result)


def config_after(layout: AnyLayout | None, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of config.json after a layout: as before, unless the layout has a `new_config`."""
    new_config = getattr(layout, "new_config", None)
    changed: Mapping[str, Any] = config if new_config is None else new_config(config)
    return changed
