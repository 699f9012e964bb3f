"""A layout as checkpoints see it: anything callable from named tensors to named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

import torch

from hf_stream.checkpoint.matches import Matches
from hf_stream.checkpoint.quantized import check_whole
from hf_stream.errors import LayoutError

FileFormat: TypeAlias = Literal["safetensors", "torchscript"]
SAFETENSORS: Final = "safetensors"
TORCHSCRIPT: Final = "torchscript"

AnyLayout: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def apply_layout(
    layout: AnyLayout | None, tensors: Mapping[str, torch.Tensor], *, strict: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors as the layout names and shapes them; without one, as they are.

    Args:
        layout: The layout.
        tensors: What it is given.
        strict: Whether a rule that finds nothing is an error, and not a warning.

    Raises:
        LayoutError: The layout does not fit, gives something else than named tensors, or parts quantized weights from
            their scales.
    """
    result, matches = map_tensors(layout, tensors)
    matches.report(strict=strict)
    return result


def map_tensors(
    layout: AnyLayout | None, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], Matches]:
    """The same without a word about rules that find nothing, but with what they have found.

    A layout that counts has a method `with_matches`, which returns both; others count nothing.
    """
    if layout is None:
        return dict(tensors), Matches()
    if not callable(layout):
        raise LayoutError(
            f"layout= is a {type(layout).__name__} and cannot be called; pass a Layout, a function, "
            "or what hf_stream.layouts.get gives for a name"
        )
    with_matches = getattr(layout, "with_matches", None)
    result, matches = (layout(tensors), Matches()) if with_matches is None else with_matches(tensors)
    if not isinstance(result, Mapping):
        raise LayoutError(f"a layout must return a mapping of names to tensors, got {type(result).__name__}")
    for name, tensor in result.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"a layout must return names and tensors, got {name!r}: {type(tensor).__name__}")
    check_whole(tensors, result)
    return dict(result), matches


def config_after(layout: AnyLayout | None, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of config.json after a layout: as before, unless the layout has a `new_config`."""
    new_config = getattr(layout, "new_config", None)
    changed: Mapping[str, Any] = config if new_config is None else new_config(config)
    return changed


def file_format_of(layout: AnyLayout | None) -> FileFormat:
    """The format in which what a layout makes is kept: safetensors, unless the layout has a `file_format`."""
    chosen: FileFormat = getattr(layout, "file_format", SAFETENSORS)
    return chosen


def check_files(layout: AnyLayout | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let a layout that has a `check_files` look at what is to be written in its own format; it may warn."""
    check = getattr(layout, "check_files", None)
    if check is not None:
        check(tensors)
