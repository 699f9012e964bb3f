"""Named tensors, some of which show the same weight: what happens to one of them happens to all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from hf_stream.lazy import LazyTensor


class TiedTensors:
    """Named tensors that can be exchanged, tied ones together.

    Attributes:
        tensors: What is there now.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self._key = {name: _identity(tensor) for name, tensor in tensors.items()}
        self._names: dict[Hashable, list[str]] = {}
        for name, key in self._key.items():
            self._names.setdefault(key, []).append(name)
        self._untied: list[str] = []

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Put another tensor under this name alone."""
        if name in self._key:
            names = self._names[self._key.pop(name)]
            if len(names) > 1:
                self._untied += names
            names.remove(name)
        self.tensors[name] = tensor

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Put another tensor under this name and those tied to it."""
        for tied in self._names[self._key[name]] if name in self._key else (name,):
            self.tensors[tied] = tensor

    def untied(self) -> list[str]:
        """Names of which some were tied before."""
        return list(dict.fromkeys(self._untied))


def _identity(tensor: torch.Tensor) -> Hashable:
    return tensor.identity if isinstance(tensor, LazyTensor) else id(tensor)
