"""A layout as checkpoints see it: anything callable from named tensors to named tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from hf_stream.checkpoint.config import config_of
from hf_stream.checkpoint.matches import Matches
from hf_stream.checkpoint.quantized import check_whole
from hf_stream.errors import ArgumentTypeError, LayoutError
from hf_stream.lazy import planned
from hf_stream.lazy.given import kind

FileFormat: TypeAlias = Literal["safetensors", "torchscript"]
SAFETENSORS: Final = "safetensors"
TORCHSCRIPT: Final = "torchscript"

Layout = TypeVar("Layout")
AnyLayout: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def apply_layout(
    layout: AnyLayout | None, tensors: Mapping[str, torch.Tensor], *, config: object = None, strict: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors as the layout names and shapes them; without one, as they are.

    Args:
        layout: The layout.
        tensors: What it is given.
        config: A model's config, for sizes that the layout does not have: what `config_of` takes. Default: the one
            beside a checkpoint.
        strict: Whether a rule that finds nothing is an error, and not a warning.

    Raises:
        ArgumentTypeError: It is no layout.
        LayoutError: The layout does not fit, gives something else than named tensors, or parts quantized weights from
            their scales.
    """
    result, matches = map_tensors(layout, tensors, config)
    matches.report(strict=strict)
    return result


def map_tensors(
    layout: AnyLayout | None, tensors: Mapping[str, torch.Tensor], config: object = None
) -> tuple[dict[str, torch.Tensor], Matches]:
    """The same without a word about rules that find nothing, but with what they have found.

    A layout that counts has a method `with_matches`, which returns both; others count nothing.
    """
    if layout is None:
        return dict(tensors), Matches()
    check_layout(layout)
    layout = bound(layout, tensors, config)
    with_matches = getattr(layout, "with_matches", None)
    result: Any
    result, matches = (planned(layout, tensors), Matches()) if with_matches is None else planned(with_matches, tensors)
    if not isinstance(result, Mapping):
        remedy = "; it makes a layout when it is called: pass what it returns" if callable(result) else ""
        raise LayoutError(f"a layout must return a mapping of names to tensors, got {kind(result)}{remedy}")
    for name, tensor in result.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"a layout must return names and tensors, got {name!r}: {type(tensor).__name__}")
    check_whole(tensors, result)
    return dict(result), matches


def check_layout(layout: object) -> None:
    """Refuse what cannot be a layout, because it cannot be called with named tensors.

    Raises:
        ArgumentTypeError: It is something else; says what to pass.
    """
    if layout is None:
        return
    if isinstance(layout, str):
        remedy = f"pass hf_stream.layouts.get('{layout}', config), or a Layout"
    elif isinstance(layout, Sequence) or hasattr(layout, "moves"):
        remedy = "put rules into a Layout: Layout([...])"
    elif not callable(layout) or isinstance(layout, nn.Module):
        remedy = "pass a Layout, or a function of named tensors"
    elif not _takes_one(layout):
        remedy = "it cannot be called with named tensors alone; if it makes a layout, pass what it returns"
    else:
        return
    raise ArgumentTypeError(f"layout= is {kind(layout)}; {remedy}")


def _takes_one(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind({})
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def bound(layout: AnyLayout, tensors: Mapping[str, torch.Tensor], config: object = None) -> AnyLayout:
    """The layout with the sizes that a config tells, if it needs one; arguments as in `apply_layout`."""
    if not getattr(layout, "needs_config", False):
        return layout
    return layout_with_config(layout, getattr(tensors, "config", None) if config is None else config_of(config))


def layout_with_config(layout: Layout, config: object) -> Layout:
    """A layout with the sizes that a model's config tells, if it has a `with_config`; as it is, if not."""
    with_config = getattr(layout, "with_config", None)
    changed: Layout = layout if with_config is None else with_config(config)
    return changed


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
