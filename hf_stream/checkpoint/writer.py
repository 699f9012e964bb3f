"""CheckpointWriter: every file, header and offset is fixed first; then tensors come in any order, from any thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from hf_stream.checkpoint.files import DEFAULT_MAX_SHARD_SIZE, CheckpointFiles, TensorLike
from hf_stream.checkpoint.staging import Staging
from hf_stream.copying.region import Region
from hf_stream.errors import CheckpointError
from hf_stream.lazy import write_into
from hf_stream.storage.file import FileStorage

Span = tuple[int, int]
Box = tuple[Span, ...]
Index = int | slice | type(Ellipsis)  # type: ignore[valid-type]


class CheckpointWriter:
    """Writes a safetensors checkpoint whose tensors' names, shapes and dtypes are known beforehand.

    Space for all files is reserved at the start. Tensors, or slices of them, are then written in any order and from any
    thread. The checkpoint appears with `close()`; until then, and after any error, the destination is as it was.

    Args:
        directory: Where the checkpoint is to be; what weights it has are replaced.
        specs: Name -> anything with `shape` and `dtype` (a real, lazy or meta tensor).
        max_shard_size: Bytes, or a string such as "5GB".
        metadata: Text entries for the files' headers.

    Raises:
        FormatError: The format cannot hold a name, a type or a shape.
        CheckpointError: No space, the destination is a file, or another process is saving to it.

    >>> specs = {"w": torch.empty(4, 2, device="meta")}
    >>> with CheckpointWriter("out", specs) as writer:
    ...     writer.write_slice("w", slice(0, 2), torch.ones(2, 2))
    ...     writer.write_slice("w", slice(2, 4), torch.zeros(2, 2))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        specs: Mapping[str, TensorLike],
        *,
        max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._files = CheckpointFiles.plan(specs, max_shard_size=max_shard_size, metadata=metadata)
        self._staging = Staging(directory)
        self._lock = threading.Lock()
        self._open = True
        try:
            self._regions = reserve(self._staging, self._files)
        except BaseException:
            self._staging.abandon()
            raise
        # What of each tensor is still to come, as boxes.
        self._missing: dict[str, list[Box]] = {
            name: [tuple((0, n) for n in region.size)] if region.numel else [] for name, region in self._regions.items()
        }

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        if error is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor, lazy or real, of just the shape and dtype that was announced."""
        self.write_slice(name, ..., tensor)

    def write_slice(self, name: str, index: Index | Sequence[Index], tensor: torch.Tensor) -> None:
        """Write `tensor` as `name[index]`.

        Args:
            name: A name in `specs`.
            index: Integers, slices with step 1 and an ellipsis, as in `x[0, 2:4]`.
            tensor: The values, of the shape that `name[index]` has, and of its dtype.

        Raises:
            CheckpointError: The name is unknown, the index reaches too far, or shape or dtype are others.
        """
        if not self._open:
            raise CheckpointError(f"'{name}': the writer is closed; open another one to write more")
        if name not in self._regions:
            raise CheckpointError(f"'{name}' is not among the {len(self._regions)} tensors that were announced")
        region = self._regions[name]
        window = torch.empty_strided(region.size, region.stride, dtype=region.dtype, device="meta")
        box = _box(name, region.size, index if isinstance(index, tuple) else (index,))  # type: ignore[arg-type]
        part = window[index]  # type: ignore[index]
        if tensor.shape != part.shape or tensor.dtype != part.dtype:
            raise CheckpointError(
                f"'{name}': announced were shape {list(part.shape)} and {part.dtype} here, "
                f"got shape {list(tensor.shape)} and {tensor.dtype}"
            )
        offset = region.offset + part.storage_offset() * region.dtype.itemsize
        write_into([(tensor, Region(region.storage, region.dtype, tuple(part.shape), part.stride(), offset), name)])
        with self._lock:
            self._missing[name] = [rest for old in self._missing[name] for rest in _without(old, box)]

    def close(self) -> None:
        """Make it a checkpoint.

        Raises:
            CheckpointError: Something was never written. The writer stays open: write it, or leave by an error.
        """
        lacking = [name for name, boxes in self._missing.items() if boxes]
        if lacking:
            name = lacking[0]
            gap = ", ".join(f"{start}:{stop}" for start, stop in self._missing[name][0])
            raise CheckpointError(
                f"{len(lacking)} of {len(self._missing)} tensors are not whole: '{name}' lacks [{gap}]; write it first"
            )
        self._open = False
        finish(self._staging, self._files)

    def abandon(self) -> None:
        """Stop, and leave the destination as it was."""
        self._open = False
        self._staging.abandon()


def reserve(staging: Staging, files: CheckpointFiles) -> dict[str, Region]:
    """Create every shard that is not finished, with its header, and say where each of its tensors goes."""
    storages: dict[str, FileStorage] = {
        shard.name: staging.create(shard.name, shard.header.nbytes)
        for shard in files.shards
        if shard.name not in staging.finished
    }
    regions = {}
    for shard in files.shards:
        if storage := storages.get(shard.name):
            storage.write_from(memoryview(shard.prefix), 0)
            for name, info in shard.header.tensors.items():
                regions[name] = Region.contiguous(storage, info.torch_dtype, info.torch_shape, info.start)
    return regions


def finish(staging: Staging, files: CheckpointFiles) -> None:
    """Declare every shard whole, add the index, and commit."""
    for shard in files.shards:
        if shard.name not in staging.finished:
            staging.finish(shard.name)
    for name, content in files.small.items():
        staging.write(name, content)
    staging.commit(entry=files.entry, stale=files.family)


def _box(name: str, shape: Sequence[int], index: Sequence[object]) -> Box:
    """The box of a tensor of `shape` that a basic index means."""
    after = len(index) - list(index).index(...) - 1 if ... in index else 0
    before = len(index) - after - (... in index)
    if before + after > len(shape):
        raise CheckpointError(f"'{name}': {before + after} indices for shape {list(shape)}")
    full = [*index[:before], *[slice(None)] * (len(shape) - before - after), *index[len(index) - after :]]
    box: list[Span] = []
    for size, at in zip(shape, full, strict=True):
        if isinstance(at, slice):
            start, stop, step = at.indices(size)
            if step != 1:
                raise CheckpointError(f"'{name}': slices need step 1, got {at.step}; write the rows one by one")
            box.append((start, max(start, stop)))
        elif isinstance(at, int) and -size <= at < size:
            box.append((at % size, at % size + 1))
        else:
            raise CheckpointError(f"'{name}': index {at!r} does not fit a dimension of {size}")
    return tuple(box)


def _without(old: Box, cut: Box) -> list[Box]:
    """`old` less `cut`, as boxes: at most two for each dimension."""
    overlap = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(old, cut, strict=True))
    if any(start >= stop for start, stop in overlap):
        return [old]
    rest = []
    for dim, ((a, b), (c, d)) in enumerate(zip(old, overlap, strict=True)):
        for span in ((a, c), (d, b)):
            if span[0] < span[1]:
                rest.append((*overlap[:dim], span, *old[dim + 1 :]))
    return rest
