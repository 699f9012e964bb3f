"""Tensors as users give them: what is no tensor, or no mapping of names to tensors, is told with what to give."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hf_stream.errors import ArgumentTypeError


def named_tensors(tensors: Any, taker: str) -> Mapping[str, torch.Tensor]:
    """A mapping of names to tensors, if it is one.

    Args:
        tensors: Such a mapping.
        taker: What takes it, for errors.

    Raises:
        ArgumentTypeError: It is something else, or has other names than texts, or something that is no tensor.
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(
            f"{taker} takes a mapping of names to tensors, got {kind(tensors)}; {_instead(tensors)}"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"{taker}: {name!r:.100} is no name of a tensor; names are texts")
        check_tensor(tensor, f"{taker}: '{name}'")
    return tensors


def several_tensors(tensors: Any, taker: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a mapping with their names, or of any other iterable with none.

    Raises:
        ArgumentTypeError: It is something else, a tensor by itself included: its rows are not what was meant.
    """
    if isinstance(tensors, Mapping):
        return list(named_tensors(tensors, taker).items())
    if isinstance(tensors, torch.Tensor | str) or not isinstance(tensors, Iterable):
        raise ArgumentTypeError(
            f"{taker} takes a mapping or a list of tensors, got {kind(tensors)}; {_instead(tensors)}"
        )
    several = [("", tensor) for tensor in tensors]
    for number, (_, tensor) in enumerate(several):
        check_tensor(tensor, f"{taker}: number {number}")
    return several


def check_tensor(tensor: object, what: str) -> None:
    """Refuse what is no tensor.

    Args:
        tensor: The tensor, lazy or real.
        what: What it is called, for errors.

    Raises:
        ArgumentTypeError: It is something else.
    """
    if isinstance(tensor, torch.Tensor):
        return
    if hasattr(tensor, "__array__"):
        remedy = "make it one: torch.from_numpy(...), or torch.tensor(...) of a number"
    elif isinstance(tensor, int | float | complex):
        remedy = "make it one: torch.tensor(...)"
    elif isinstance(tensor, Mapping | list | tuple):
        remedy = "hf_stream.save_nested keeps dicts, lists and tuples in each other"
    else:
        remedy = "leave it out"
    raise ArgumentTypeError(f"{what} is {kind(tensor)} and no tensor; {remedy}")


def kind(value: object) -> str:
    """What a value is, in words."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if isinstance(value, FunctionType):
        return f"the function {value.__qualname__}"
    if isinstance(value, str | os.PathLike):
        return f"'{os.fspath(value)}'"
    if value is None:
        return "None"
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _instead(value: object) -> str:
    """What to give in place of something that is no mapping."""
    if isinstance(value, str | os.PathLike):
        return f"open it: hf_stream.open_checkpoint('{os.fspath(value)}')"
    if isinstance(value, nn.Module):
        return "pass its .state_dict()"
    if isinstance(value, torch.Tensor):
        return "put it into a dict with its name, or into a list"
    return "pass a dict, or what hf_stream.open_checkpoint gives"
