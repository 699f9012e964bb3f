"""What a comparison takes as one of its sides: a path, named tensors, or a module."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from hf_stream.checkpoint.components import open_repository
from hf_stream.checkpoint.paths import given_path
from hf_stream.errors import ArgumentTypeError
from hf_stream.lazy import LazyTensor, named_tensors
from hf_stream.lazy.given import kind

Side = str | os.PathLike[str] | Mapping[str, torch.Tensor] | nn.Module


def tensors_of(side: Side) -> Mapping[str, torch.Tensor]:
    """The tensors of one side by their names; those of a module as its `state_dict` names them.

    Raises:
        ArgumentTypeError: It is something else, or a mapping of something else.
    """
    if isinstance(side, nn.Module):
        return {name: tensor for name, tensor in side.state_dict().items() if isinstance(tensor, torch.Tensor)}
    if isinstance(side, str | os.PathLike):
        return open_repository(given_path(side))
    if not isinstance(side, Mapping):
        raise ArgumentTypeError(f"verify takes paths, modules and mappings of named tensors, got {kind(side)}")
    return named_tensors(side, "verify")


def without_tied(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """A module's tensors without other names of those that the other side has: files keep tied ones once."""
    lacking = [name for name in tensors if name not in others]
    if not lacking:
        return tensors
    there = {LazyTensor.from_tensor(tensor).identity for name, tensor in tensors.items() if name in others}
    tied = {name for name in lacking if LazyTensor.from_tensor(tensors[name]).identity in there}
    return {name: tensor for name, tensor in tensors.items() if name not in tied}
