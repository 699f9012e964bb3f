"""The lower bound for loading: bytes from the files straight into the model's parameters, by hand-made calls of preadv.

Knows the two models of checkpoints.py and nothing else; parses headers without checking them.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

BATCH_NBYTES = 16 << 20
_of_thread = threading.local()
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file and the part of a parameter they belong to (elements, from its start)."""

    file: int
    offset: int
    nbytes: int
    parameter: str
    start: int


def load(source: Path, dtype: torch.dtype, threads: int, huge_pages: bool) -> dict[str, torch.Tensor]:
    """Load a bfloat16 checkpoint with its experts merged as transformers merges them.

    Args:
        source: Directory of the checkpoint.
        dtype: Of the parameters; any other than bfloat16 is cast from a buffer of 16 MiB per thread.
        threads: How many read at a time.
        huge_pages: Whether to ask the kernel for huge pages under the parameters.

    Returns:
        Parameters by name.
    """
    files = [os.open(path, os.O_RDONLY) for path in sorted(source.glob("*.safetensors"))]
    try:
        shapes: dict[str, tuple[int, ...]] = {}
        pieces = sorted(
            (piece for file in files for piece in _pieces(file, shapes)), key=lambda piece: (piece.file, piece.offset)
        )
        parameters = _allocate(shapes, dtype, huge_pages)
        read = _read if dtype == torch.bfloat16 else _read_and_cast
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda batch: read(batch, parameters), _batches(pieces)):
                pass
        return parameters
    finally:
        for file in files:
            os.close(file)


def _pieces(file: int, shapes: dict[str, tuple[int, ...]]) -> Iterator[Piece]:
    """Yield where each tensor of a file goes, and note the shapes of the parameters in `shapes`."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    header = json.loads(os.pread(file, length, 8))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        rows, columns = entry["shape"][0], entry["shape"][-1]
        parameter, start, shape = name, 0, tuple(entry["shape"])
        if match := _EXPERT.fullmatch(name):
            expert, merged = int(match["expert"]), match["part"] != "down"
            # [inner, hidden] of gate and up become [experts, 2 * inner, hidden], gate first.
            height = 2 * rows if merged else rows
            parameter = f"{match['experts']}.{'gate_up_proj' if merged else 'down_proj'}"
            start = (expert * height + (rows if match["part"] == "up" else 0)) * columns
            shape = (max(expert + 1, shapes.get(parameter, (0,))[0]), height, columns)
        shapes[parameter] = shape
        # Large tensors are read in parts, so that all threads have work to the end.
        for offset in range(begin, end, BATCH_NBYTES):
            nbytes = min(BATCH_NBYTES, end - offset)
            yield Piece(file, 8 + length + offset, nbytes, parameter, start + (offset - begin) // 2)


def _allocate(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, huge_pages: bool) -> dict[str, torch.Tensor]:
    if not huge_pages:
        return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    memory = mmap.mmap(-1, sum(sizes.values()) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    parts = torch.split(torch.frombuffer(memory, dtype=dtype), list(sizes.values()))
    return {name: part.view(shapes[name]) for name, part in zip(sizes, parts, strict=True)}


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Group pieces that follow each other in a file into single reads of at most `BATCH_NBYTES`."""
    batch: list[Piece] = []
    for piece in pieces:
        if batch:
            last = batch[-1]
            follows = (last.file, last.offset + last.nbytes) == (piece.file, piece.offset)
            nbytes = piece.offset + piece.nbytes - batch[0].offset
            if not follows or nbytes > BATCH_NBYTES or len(batch) == 1024:  # preadv takes 1024 buffers
                yield batch
                batch = []
        batch.append(piece)
    if batch:
        yield batch


def _read(batch: list[Piece], parameters: dict[str, torch.Tensor]) -> None:
    _preadv(batch, [_memory_of(parameters[piece.parameter], piece) for piece in batch])


def _read_and_cast(batch: list[Piece], parameters: dict[str, torch.Tensor]) -> None:
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = torch.empty(BATCH_NBYTES // 2, dtype=torch.bfloat16)
    sizes = [piece.nbytes // 2 for piece in batch]
    buffer = _of_thread.buffer[: sum(sizes)]
    _preadv(batch, [buffer.view(torch.uint8).numpy().data])
    parts = torch.split(buffer, sizes)
    for piece, part in zip(batch, parts, strict=True):
        parameters[piece.parameter].view(-1)[piece.start : piece.start + part.numel()].copy_(part)


def _memory_of(parameter: torch.Tensor, piece: Piece) -> memoryview:
    memory = parameter.view(-1).view(torch.uint8).numpy()
    return memory[2 * piece.start : 2 * piece.start + piece.nbytes].data


def _preadv(batch: list[Piece], buffers: list[memoryview]) -> None:
    wanted = sum(piece.nbytes for piece in batch)
    got = os.preadv(batch[0].file, buffers, batch[0].offset)
    if got != wanted:
        raise OSError(f"read {got} of {wanted} bytes at {batch[0].offset}")
