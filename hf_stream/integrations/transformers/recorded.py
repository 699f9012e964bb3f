"""What transformers' `save_pretrained` would write as weights: recorded, as lazies, in place of being written.

Everything that decides which tensors are saved, under which names, in which files and with which metadata is
transformers' own code, run as ever: ignored and tied weights, adapters, quantizers, reverted conversions, shards, the
index. Only three functions that it calls on the way are replaced: two that look at storages, which lazies have not, to
tell tied weights and to size shards; and the one that writes a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from huggingface_hub import StateDictSplit, get_torch_storage_id, get_torch_storage_size
from transformers import modeling_utils

from hf_stream.checkpoint.files import CheckpointFiles, ShardFile, family
from hf_stream.formats import encode_header
from hf_stream.formats.shards import split_into_shards
from hf_stream.formats.shared import Shared
from hf_stream.integrations.transformers.offloaded_weights import OffloadedWeights
from hf_stream.lazy import LazyTensor, named_tensors


class Recording:
    """The weight files of one save.

    Args:
        lazy: Whether transformers' conversions get lazies. Those of quantizers may need more than a LazyTensor can.

    Attributes:
        pattern: The files' name with `{suffix}` where the shard number goes.
        tensors: Those of all files.
    """

    def __init__(self, lazy: bool = True) -> None:
        self.pattern = ""
        self.tensors: dict[str, torch.Tensor] = {}
        self._shards: list[ShardFile] = []
        self._lazy = lazy
        # By the id of a lazy: itself, to keep the id its own, and the bytes and the id of the storage that it shows a
        # part of. Only empty tensors still share one here: huggingface_hub takes all of them for the same.
        self._storages: dict[int, tuple[LazyTensor, int, Hashable]] = {}

    def files(self, index: str) -> CheckpointFiles:
        """The files, of which transformers has written all but the weights.

        Args:
            index: What transformers calls the index, if there are several.
        """
        single = self.pattern.format(suffix="")
        sharded = len(self._shards) > 1
        # Adapters share the index's name with the model that they are for.
        own_index = sharded or single.startswith("model")
        # What is saved without weights leaves those that are there alone.
        stale = family(self.pattern, index if own_index else None) if self._shards else re.compile("(?!)")
        return CheckpointFiles(tuple(self._shards), {}, index if sharded else single, stale)

    def without_tied(
        self, plain: Callable[..., dict[str, Any]], state_dict: Mapping[str, Any], model: Any
    ) -> dict[str, Any]:
        """What is left when transformers has removed tied weights, as lazies."""
        # Like transformers, which leaves texts out.
        named = {name: tensor for name, tensor in state_dict.items() if not isinstance(tensor, str)}
        named_tensors(named, "state_dict=")
        if not self._lazy:
            return plain(named, model)
        twins: dict[Hashable, torch.Tensor] = {}
        kept = plain({name: _stand_in(tensor, twins) for name, tensor in named.items()}, model)
        offloaded = OffloadedWeights(model)
        lazies: dict[str, Any] = {}
        for name, stand_in in kept.items():
            tensor = named[name]
            if tensor.is_meta:
                found = offloaded.get(name)
                tensor = tensor if found is None else found
            lazies[name] = self._as_lazy(tensor, sized_by_storage=stand_in is not None and not named[name].is_meta)
        return lazies

    def _as_lazy(self, tensor: torch.Tensor, sized_by_storage: bool) -> torch.Tensor:
        if isinstance(tensor, LazyTensor) or not _has_memory(tensor):
            return tensor
        lazy = LazyTensor.from_tensor(tensor)
        if not tensor.numel():
            # Transformers copies all empty tensors but one, as they seem to share a storage; copies still seem to.
            tensor, sized_by_storage = tensor.clone(), True
        if sized_by_storage:
            self._storages[id(lazy)] = lazy, get_torch_storage_size(tensor), get_torch_storage_id(tensor)
        return lazy

    def split(
        self, state_dict: Mapping[str, Any], *, filename_pattern: str, max_shard_size: int | str
    ) -> StateDictSplit:
        """Spread tensors over files as `huggingface_hub` does: one counts with the whole storage under it.

        A tensor that a conversion has made, and one that was offloaded, counts as itself.
        """
        self.pattern = filename_pattern
        sizes: dict[str, int] = {}
        groups: dict[str, Hashable] = {}
        for name, tensor in state_dict.items():
            if isinstance(tensor, LazyTensor):
                _, sizes[name], groups[name] = self._storages.get(id(tensor), (tensor, tensor.nbytes, None))
            else:
                sizes[name] = get_torch_storage_size(tensor)
                groups[name] = get_torch_storage_id(tensor)
        return split_into_shards(sizes, max_shard_size, filename_pattern, groups)

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        filename: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what a file is to hold."""
        specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        self._shards.append(ShardFile(os.path.basename(filename), *encode_header(specs, metadata)))
        self.tensors.update(tensors)


class _StandIn(torch.Tensor):
    """Shows transformers where a tensor lies.

    One that shares a storage, but no byte, with others is copied so that it has a storage of its own. For that it is
    enough to know which ones they are: their copies are None.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def clone(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        return None


def _stand_in(tensor: torch.Tensor, twins: dict[Hashable, torch.Tensor]) -> torch.Tensor:
    """What transformers may look at in place of a tensor to see what it is tied to.

    Lazies have no storage: a small tensor stands in for all that show the same.
    """
    if isinstance(tensor, LazyTensor):
        return twins.setdefault(tensor.identity, torch.empty(1))
    return tensor.detach().as_subclass(_StandIn) if _has_memory(tensor) else tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout == torch.strided and not tensor.is_meta


_recording: ContextVar[Recording | None] = ContextVar("hf_stream_recording", default=None)


@contextmanager
def recording(lazy: bool = True) -> Iterator[Recording]:
    """Run a block in which transformers, in this context, records weights in place of writing them."""
    record = Recording(lazy)
    with _recorded():
        token = _recording.set(record)
        try:
            yield record
        finally:
            _recording.reset(token)


@Shared
@contextmanager
def _recorded() -> Iterator[None]:
    """Other threads see the replacements and pass through them untouched."""
    hooks: dict[str, Callable[..., Any]] = {
        "remove_tied_weights_from_state_dict": _remove_tied,
        "split_torch_state_dict_into_shards": _split,
        "safe_save_file": _write,
    }
    plain = {name: getattr(modeling_utils, name) for name in hooks}
    for name, hook in hooks.items():
        setattr(modeling_utils, name, partial(hook, plain[name]))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(modeling_utils, name, function)


def _remove_tied(plain: Callable[..., Any], state_dict: Mapping[str, Any], model: Any) -> Any:
    record = _recording.get()
    return plain(state_dict, model) if record is None else record.without_tied(plain, state_dict, model)


def _split(plain: Callable[..., Any], state_dict: Mapping[str, Any], **kwargs: Any) -> Any:
    record = _recording.get()
    return (plain if record is None else record.split)(state_dict, **kwargs)


def _write(plain: Callable[..., Any], tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    record = _recording.get()
    return (plain if record is None else record.write)(tensors, *args, **kwargs)
