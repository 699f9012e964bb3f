"""CheckpointWriter: every file, header and offset is fixed first; then tensors come in any order, from any thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import TracebackType

import torch

from hf_stream.checkpoint.coverage import Coverage, Index, box_of
from hf_stream.checkpoint.files import CheckpointFiles, TensorLike, check_has_data
from hf_stream.checkpoint.nearest import nearest
from hf_stream.checkpoint.paths import place_of
from hf_stream.checkpoint.save import finish, reserve
from hf_stream.checkpoint.staging import Staging
from hf_stream.copying.region import Region
from hf_stream.errors import ArgumentTypeError, CheckpointError
from hf_stream.lazy import write_into
from hf_stream.lazy.given import check_tensor, kind


class CheckpointWriter:
    """Writes a safetensors checkpoint whose tensors' names, shapes and dtypes are known beforehand.

    Space for all files is reserved at the start. Tensors, or slices of them, are then written in any order and from any
    thread. The checkpoint appears with `close()`; until then, and after any error, the destination is as it was.

    Args:
        directory: Where the checkpoint is to be; what weights it has are replaced. A path that ends in .safetensors is
            one file, beside which everything stays as it is.
        specs: Name -> anything with `shape` and `dtype` (a real, lazy or meta tensor).
        max_shard_size: For directories: bytes, or a string such as "2GB"; 5 GB by default.
        metadata: Text entries for the files' headers.
        durable: Whether to wait until everything is on the disk, so that it outlives a loss of power. None: yes, unless
            the environment has HF_STREAM_DURABLE=0.

    Raises:
        FormatError: The format cannot hold a name, a type or a shape.
        CheckpointError: No space, the destination cannot be used, or another process is saving to it.

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
        max_shard_size: int | str | None = None,
        metadata: Mapping[str, str] | None = None,
        durable: bool | None = None,
    ) -> None:
        if not isinstance(specs, Mapping):
            raise ArgumentTypeError(f"specs= is {kind(specs)}; pass a dict of what has a shape and a dtype, by name")
        for name, spec in specs.items():
            if not (isinstance(name, str) and hasattr(spec, "shape") and hasattr(spec, "dtype")):
                raise ArgumentTypeError(f"specs= has {name!r}: {kind(spec)}, which is no name of a shape and a dtype")
        place, file = place_of(directory)
        self._files = CheckpointFiles.plan(specs, max_shard_size=max_shard_size, metadata=metadata, file=file)
        self._lock = threading.Lock()
        self._writing = 0
        self._open = True
        self._staging = Staging(place, file=file, durable=durable)
        try:
            self._regions = reserve(self._staging, self._files)
        except BaseException:
            self._staging.abandon()
            raise
        self._coverage = {name: Coverage(region.size) for name, region in self._regions.items()}

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()
        elif self._open:
            try:
                self.close()
            except BaseException:
                self.abandon()
                raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor, lazy or real, of just the shape and dtype that was announced."""
        self.write_slice(name, ..., tensor)

    def write_slice(self, name: str, index: Index | tuple[Index, ...], tensor: torch.Tensor) -> None:
        """Write `tensor` as `name[index]`.

        Args:
            name: A name in `specs`.
            index: Integers, slices with step 1 and an ellipsis, as in `x[0, 2:4]`.
            tensor: The values, of the shape that `name[index]` has, and of its dtype.

        Raises:
            CheckpointError: The name is unknown, the index reaches too far, or shape or dtype are others.
            CopyError: Reading or writing failed. What was there under this index counts as not written.
        """
        if name not in self._regions:
            near = "".join(f", where '{other}' is" for other in nearest(name, self._regions)[:1])
            raise CheckpointError(
                f"'{name}' is not among the {len(self._regions)} tensors announced{near}; add it to specs"
            )
        check_tensor(tensor, f"'{name}'")
        region = self._regions[name]
        box = box_of(name, region.size, index if isinstance(index, tuple) else (index,))
        window = torch.empty_strided(region.size, region.stride, dtype=region.dtype, device="meta")[index]
        if tensor.shape != window.shape or tensor.dtype != window.dtype:
            raise CheckpointError(
                f"'{name}': shape {list(window.shape)} and {window.dtype} were announced here, "
                f"got shape {list(tensor.shape)} and {tensor.dtype}; convert it first"
            )
        check_has_data(name, tensor)
        start = region.offset + int(window.storage_offset()) * region.dtype.itemsize
        target = Region(region.storage, region.dtype, tuple(window.shape), window.stride(), start)
        with self._lock:
            if not self._open:
                raise CheckpointError(f"'{name}': the writer is closed; open another one to write more")
            self._writing += 1
            self._coverage[name].lose(box)
        try:
            write_into([(tensor, target, name)])
        except BaseException:
            with self._lock:
                self._writing -= 1
            raise
        with self._lock:
            self._writing -= 1
            self._coverage[name].add(box)

    def close(self) -> None:
        """Make it a checkpoint.

        Raises:
            CheckpointError: Something was never written, or another thread is at it. The writer stays open: write it,
                or leave by an error.
        """
        with self._lock:
            if not self._open:
                return
            if self._writing:
                raise CheckpointError(f"{self._writing} writes are still under way; wait for them before closing")
            gaps = {name: coverage.gap for name, coverage in self._coverage.items() if coverage.gap is not None}
            if gaps:
                name, gap = next(iter(gaps.items()))
                spans = ", ".join(f"{start}:{stop}" for start, stop in gap)
                raise CheckpointError(
                    f"{len(gaps)} of {len(self._coverage)} tensors are not whole: '{name}' lacks [{spans}]; "
                    "write it first"
                )
            self._open = False
        try:
            finish(self._staging, self._files)
        except BaseException:
            self._staging.abandon()
            raise

    def abandon(self) -> None:
        """Stop, and leave the destination as it was; after `close`, do nothing."""
        with self._lock:
            self._open = False
        self._staging.abandon()
