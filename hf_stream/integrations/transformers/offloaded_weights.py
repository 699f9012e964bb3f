"""Weights that accelerate has moved off a model, to the CPU or to disk, as tensors that are read when needed."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from hf_stream.errors import CopyError
from hf_stream.formats import Header, read_header
from hf_stream.lazy import LazyTensor
from hf_stream.storage import Storage


class OffloadedWeights:
    """Finds what the meta parameters and buffers of a model stand for.

    Each file's header is read once. No file stays open: an offload folder may have one for every weight, more than a
    process may have open.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._headers: dict[str, Header] = {}

    def get(self, name: str) -> torch.Tensor | None:
        """A parameter's or buffer's value: lazy if it is on disk, None if no hook on the model has it."""
        parts = name.split(".")
        # As accelerate puts its hooks: on the module of a weight, or on one further out.
        for depth in range(len(parts) - 1, -1, -1):
            try:
                module = self._model.get_submodule(".".join(parts[:depth]))
            except AttributeError:
                continue
            for weights in _weights_maps(module):
                return self._find(weights, ".".join(parts[depth:]))
        return None

    def _find(self, weights: Any, key: str) -> torch.Tensor | None:
        from accelerate.utils.offload import (  # type: ignore[import-untyped]
            OffloadedWeightsLoader,
            PrefixedDataset,
        )

        while isinstance(weights, PrefixedDataset):
            weights, key = weights.dataset, weights.prefix + key
        if not isinstance(weights, OffloadedWeightsLoader):
            return cast(torch.Tensor | None, weights.get(key))
        held: torch.Tensor | None = weights.state_dict.get(key)
        info = weights.index.get(key)
        if held is not None or info is None:
            return held
        dtype = getattr(torch, info["dtype"]) if "dtype" in info else None
        file = info.get("safetensors_file")
        if file is not None:
            return self._in_safetensors(file, info.get("weight_name", key), dtype)
        storage = _ClosedFile(os.path.join(weights.save_folder, f"{key}.dat"))
        return LazyTensor.from_storage(storage, dtype or torch.float32, info["shape"], 0)

    def _in_safetensors(self, file: str, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        if file not in self._headers:
            self._headers[file] = read_header(file)
        info = self._headers[file].tensors[name]
        lazy = LazyTensor.from_storage(_ClosedFile(file), info.torch_dtype, info.torch_shape, info.start)
        return lazy if dtype is None else lazy.to(dtype)


def _weights_maps(module: nn.Module) -> Iterator[Mapping[str, Any]]:
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        weights = getattr(part, "weights_map", None)
        if weights is not None:
            yield weights


class _ClosedFile(Storage):
    """A file that is open only while it is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.path.realpath(path)
        status = os.stat(path)
        self.nbytes = status.st_size
        self._place = ("file", status.st_dev, status.st_ino)

    @property
    def place(self) -> Hashable:
        return self._place

    def read_into(self, buffer: memoryview, offset: int) -> None:
        with open(self.name, "rb", buffering=0) as file:
            file.seek(offset)
            while len(buffer):
                moved = file.readinto(buffer)
                if not moved:
                    raise CopyError(f"'{self.name}' ends before its last tensor: the file was changed while in use")
                buffer = buffer[moved:]

    def write_from(self, buffer: memoryview, offset: int) -> None:
        raise CopyError(f"'{self.name}': offloaded weights are only read")
