"""What one process used: memory from /proc, time, and a fingerprint of what it made."""

from __future__ import annotations

import bisect
import mmap
import resource
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MEMORY_FIELDS = ("VmRSS", "RssAnon", "RssFile")

Result = torch.nn.Module | Mapping[str, torch.Tensor] | Path


def read_memory(pid: int | str = "self") -> dict[str, int]:
    """Return the resident memory of a process by kind, in bytes."""
    memory = {}
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            field, _, rest = line.partition(":")
            if field in MEMORY_FIELDS:
                memory[field] = int(rest.split()[0]) * 1024
    return memory


def available_memory() -> int:
    """Return how many bytes could be used without swapping."""
    with open("/proc/meminfo") as meminfo:
        return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))


class PeakSampler:
    """Samples the memory of another process on a thread and keeps the largest value of each kind.

    Sampling from outside sees peaks that a thread inside would miss while other code holds its interpreter lock.
    """

    def __init__(self, pid: int, interval: float = 0.002):
        self.peak = read_memory(pid)
        self._pid = pid
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            now = read_memory(self._pid)
            self.peak = {kind: max(peak, now.get(kind, 0)) for kind, peak in self.peak.items()}

    def stop(self) -> dict[str, int]:
        """End sampling and return the peaks in bytes."""
        self._stop.set()
        self._thread.join()
        return self.peak


class Reserve:
    """Memory kept in use until the work starts.

    A virtual machine may hand free memory back to its host after seconds; touching it again then costs several times
    an ordinary page fault, which would be counted as work. Memory released at the last moment is free and still backed.
    """

    def __init__(self, nbytes: int):
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(self._memory, dtype=torch.uint8).fill_(1)

    def release(self) -> None:
        """Give the memory back to the operating system."""
        self._memory.close()


class Stopwatch:
    """Wall and CPU time since it was made; CPU time is that of all threads and of finished child processes."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def read(self) -> tuple[float, float]:
        """Return wall seconds and CPU seconds."""
        return time.perf_counter() - self._wall, _cpu_seconds() - self._cpu


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def anonymous_nbytes(result: Result) -> int:
    """Return how many bytes of a loaded result lie in anonymous memory; tensors on mapped files do not count."""
    if isinstance(result, Path):
        return 0
    starts, from_file = [], []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
        starts.append(int(addresses.split("-")[0], 16))
        from_file.append(inode != "0")
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for _, tensor in tensors_of(result)}
    return sum(
        storage.nbytes()
        for address, storage in storages.items()
        if storage.nbytes() and not from_file[bisect.bisect_right(starts, address) - 1]
    )


def tensors_of(result: Result) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a module, a mapping, or the safetensors files or partitions of a directory.

    Of a quantized tensor: what it is made of.
    """
    if isinstance(result, torch.nn.Module):
        for name, tensor in result.state_dict().items():
            parts = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else ()
            yield from ((f"{name}.{part}", getattr(tensor, part)) for part in parts)
            if not parts:
                yield name, tensor
    elif isinstance(result, Path):
        for file in sorted(result.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118, not a dict
        for file in sorted(result.glob("decoder.*.pt")):
            attribute = file.name.removesuffix(".pt").split(".tp_")[0]
            yield file.name, getattr(torch.jit.load(file), attribute)
    else:
        yield from result.items()


def fingerprint(result: Result) -> str:
    """Return a short text that is equal for two results with the same names, dtypes, shapes and bytes."""
    entries: Iterable[str] = (
        f"{name} {tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(_bytes_of(tensor))}"
        for name, tensor in tensors_of(result)
    )
    return f"{zlib.crc32(chr(10).join(sorted(entries)).encode()):08x}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
