"""Run lazies: every result's copies at once, then deferred operations one by one, each freed before the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import overload

import torch

from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE, execute
from hf_stream.copying.plan import Copy
from hf_stream.copying.progress import Progress, progress_bar
from hf_stream.copying.region import Region
from hf_stream.formats.collector import collector_paused
from hf_stream.lazy.deferred import NOWHERE, in_memory, plain_torch, run_deferred
from hf_stream.lazy.given import several_tensors
from hf_stream.lazy.lower import Pending, lower
from hf_stream.lazy.recording import is_recording
from hf_stream.lazy.sources import Compute
from hf_stream.lazy.survey import say_reading
from hf_stream.lazy.tensor import LazyTensor, dressed
from hf_stream.storage.file import FileStorage
from hf_stream.storage.memory import advise_huge_pages
from hf_stream.utils.sizes import nbytes_of

Job = tuple[torch.Tensor, Region, str]


def write_into(
    jobs: Iterable[Job],
    *,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    threads: int | None = None,
    progress: bool | Progress | None = False,
    desc: str = "",
) -> None:
    """Fill each region with its tensor's elements, cast to the region's dtype.

    Args:
        jobs: Triples of a tensor (lazy or real), the region to fill (the same size) and a name for error messages.
        buffer_size: Bytes in flight, at most, also as "64MB"; the inputs of one deferred operation come on top.
        threads: Threads that move bytes; by default one for each core, and at most four.
        progress: True for a bar in bytes, None for a bar on terminals only, or an object with `update(n)`.
        desc: What the bar says.

    Raises:
        LazyTensorError: A tensor and its region differ in size; nothing has been written then.
        CopyError: Reading or writing failed; names the tensor and the files.
    """
    if is_recording():
        jobs = list(jobs)
        say_reading("materialize", [tensor for tensor, _, _ in jobs])
    with plain_torch():
        with collector_paused():
            copies, pending = plan_jobs(jobs)
        total = sum(copy.dst.nbytes for copy in copies)
        total += sum(entry.nbytes for entries in pending.values() for entry in entries)
        with progress_bar(progress, total, desc) as bar:
            # Not `bar or False`: a bar of unknown length has no truth value.
            counter = False if bar is None else bar
            execute(copies, buffer_size=buffer_size, threads=threads, progress=counter)
            for compute, outputs in run_deferred(pending, buffer_size):
                entries = [entry.copy_from(outputs) for entry in pending[compute]]
                execute(entries, buffer_size=buffer_size, threads=threads, progress=counter)
                del entries, outputs  # before the next operation runs


def plan_jobs(jobs: Iterable[Job]) -> tuple[list[Copy], dict[Compute, list[Pending]]]:
    """The copies of all jobs, and the boxes that wait for each deferred operation. Reads nothing."""
    copies: list[Copy] = []
    pending: dict[Compute, list[Pending]] = {}
    for tensor, region, name in jobs:
        for entry in lower(LazyTensor.from_tensor(tensor), region, name):
            if not isinstance(entry, Copy):
                pending.setdefault(entry.output.compute, []).append(entry)
            elif not (entry.is_raw and entry.src == entry.dst):  # a tensor into itself
                copies.append(entry)
    return copies, pending


@overload
def materialize(
    tensors: Mapping[str, torch.Tensor],
    *,
    device: torch.device | str | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = False,
    desc: str = "",
    alias: bool = False,
) -> dict[str, torch.Tensor]: ...
@overload
def materialize(
    tensors: Iterable[torch.Tensor],
    *,
    device: torch.device | str | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = False,
    desc: str = "",
    alias: bool = False,
) -> list[torch.Tensor]: ...
def materialize(
    tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor],
    *,
    device: torch.device | str | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = False,
    desc: str = "",
    alias: bool = False,
) -> dict[str, torch.Tensor] | list[torch.Tensor]:
    """Read many tensors at once, in parallel.

    Args:
        tensors: A mapping, or an iterable, of tensors; real ones are given back as they are (moved to `device`). The
            same LazyTensor given twice becomes the same tensor twice; a parameter becomes a parameter, with the
            attributes other code has set on it.
        device: Where to put the results; each tensor's own device by default.
        buffer_size: Bytes in flight beyond the results, at most, also as "64MB"; the inputs of one deferred operation
            come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, or an object with `update(n)`.
        desc: What the bar says.
        alias: Whether a CPU tensor that lies in a file just as it is may be given as a private (copy-on-write)
            mapping of the file instead of a copy, and a view of a real tensor as just that. Nothing is read then until
            it is used; the file must not be truncated or written to while the tensor lives.

    Returns:
        The tensors, under the same names or in the same order; contiguous, unless they are views of real ones. No
        gradient flows through them to what the lazies were made of.

    Raises:
        CopyError: Reading failed; names the tensor and the file.
    """
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    items = several_tensors(tensors, "materialize")
    results: dict[int, torch.Tensor] = {}
    jobs: list[Job] = []
    for name, tensor in items:
        if id(tensor) in results:
            continue
        if not isinstance(tensor, LazyTensor):
            results[id(tensor)] = tensor if device is None else tensor.to(device)
            continue
        target = torch.device(device or tensor.device)
        real = _mapped(tensor) if alias and target.type == "cpu" else None
        if real is None:
            with plain_torch():
                real = torch.empty(tensor.shape, dtype=tensor.dtype, device=target)
            if target.type != "meta":
                advise_huge_pages(real)
                jobs.append((tensor, Region.of(real), name))
        results[id(tensor)] = dressed(real, tensor)
    write_into(jobs, buffer_size=buffer_size, progress=progress, desc=desc)
    if isinstance(tensors, Mapping):
        return {name: results[id(tensor)] for name, tensor in items}
    return [results[id(tensor)] for _, tensor in items]


def _mapped(lazy: LazyTensor) -> torch.Tensor | None:
    """The tensor as a view of memory, or as a private mapping of a file that has it in one piece and as this dtype."""
    view = in_memory(lazy)
    if view is not None:
        return view
    entries = list(islice(lower(lazy, Region.contiguous(NOWHERE, lazy.dtype, lazy.shape)), 2))
    if len(entries) != 1 or not isinstance(entries[0], Copy):
        return None
    src = entries[0].src
    plain = entries[0].is_raw and src.is_contiguous and entries[0].dst.is_contiguous
    if not plain or not isinstance(src.storage, FileStorage):
        return None
    mapped = src.storage.alias(src.offset, src.dtype, src.size)
    return None if mapped is None else mapped.view(lazy.shape)
