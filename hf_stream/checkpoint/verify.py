"""Compare two checkpoints bit for bit, a few bytes at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_stream.checkpoint.components import apart
from hf_stream.checkpoint.mapping import AnyLayout, apply_layout
from hf_stream.checkpoint.sides import Side, tensors_of, without_tied
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress, progress_bar
from hf_stream.copying.region import Region
from hf_stream.lazy import LazyTensor, working_set, write_into
from hf_stream.utils.sizes import nbytes_of

Element = float | int | complex | bool

# A batch is held twice, and once more for each byte where the two differ; what copies need comes on top.
_SHARES = 4
_ALIGNMENT = 16
# Enough to keep all threads busy; each block costs some Python objects.
_BLOCKS = 4096


@dataclass(frozen=True)
class Difference:
    """The first element in which two tensors of one name, shape and dtype differ.

    Attributes:
        index: Where it is, an integer for each dimension.
        a: The element on the first side.
        b: The element on the second side.
        bits: Both elements' bytes, last byte first, in hexadecimal: they tell one NaN from another.
    """

    index: tuple[int, ...]
    a: Element
    b: Element
    bits: tuple[str, str]

    def __str__(self) -> str:
        return f"differs first at {list(self.index)}: {self.a} against {self.b} (0x{self.bits[0]} and 0x{self.bits[1]})"


@dataclass(frozen=True)
class Differences:
    """How two checkpoints differ; false if they do not.

    Attributes:
        missing: Names that only the first has.
        extra: Names that only the second has.
        shapes: Name -> both shapes, where they differ.
        dtypes: Name -> both dtypes, where they differ.
        values: Name -> the first differing element.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    values: dict[str, Difference] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.dtypes or self.values)

    def __str__(self) -> str:
        lines = [f"'{name}' is only in the first" for name in self.missing]
        lines += [f"'{name}' is only in the second" for name in self.extra]
        lines += [f"'{name}': shape {list(a)} against {list(b)}" for name, (a, b) in self.shapes.items()]
        lines += [f"'{name}': {a} against {b}" for name, (a, b) in self.dtypes.items()]
        lines += [f"'{name}' {difference}" for name, difference in self.values.items()]
        return "\n".join(lines) or "no difference"


def verify(
    a: Side,
    b: Side,
    *,
    layout: AnyLayout | None = None,
    config: object = None,
    strict: bool = False,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    threads: int | None = None,
    progress: bool | Progress | None = None,
) -> Differences:
    """Compare two checkpoints: names, shapes, dtypes, and every bit, NaNs and zeros' signs included.

    Args:
        a: What `open_checkpoint` takes, named tensors, or a module. Of a repository of several checkpoints, such as a
            pipeline of diffusers, all are compared. Of a module's tied tensors it is enough if the other side has one.
        b: Likewise.
        layout: Applied to `a` before comparing, as `convert` does it.
        config: The model's config, for sizes that the layout does not have. None: the one beside `a`.
        strict: Whether a rule of the layout that finds nothing is an error, and not a warning.
        buffer_size: Bytes of both sides held at a time, at most, also as "64MB"; the inputs of one deferred operation
            come on top.
        threads: Threads that move bytes; by default one for each core, and at most four.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        The differences; `if verify(a, b): ...` runs if there are any.

    Raises:
        ArgumentTypeError: A side is none of these.
        CheckpointError, FormatError: A path cannot be opened.
        LayoutError: The layout does not fit.
        CopyError: Reading failed.
    """
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    first, second = tensors_of(a), tensors_of(b)
    if layout is not None:
        own, others = apart(first)
        if config is None:
            config = getattr(first, "config", None)
        first = {**apply_layout(layout, own, config=config, strict=strict), **others}
    if isinstance(a, nn.Module):
        first = without_tied(first, second)
    if isinstance(b, nn.Module):
        second = without_tied(second, first)
    found = Differences(
        missing=[name for name in first if name not in second], extra=[name for name in second if name not in first]
    )
    comparable: dict[str, tuple[LazyTensor, LazyTensor]] = {}
    for name in first:
        if name not in second:
            continue
        x, y = LazyTensor.from_tensor(first[name]), LazyTensor.from_tensor(second[name])
        if x.shape != y.shape:
            found.shapes[name] = tuple(x.shape), tuple(y.shape)
        if x.dtype != y.dtype:
            found.dtypes[name] = x.dtype, y.dtype
        if x.shape == y.shape and x.dtype == y.dtype:
            comparable[name] = x, y
    total = sum(x.numel() * x.itemsize for x, _ in comparable.values())
    share = buffer_size // _SHARES
    # Used again and again: what is freed in such pieces, the C library keeps for a while.
    buffers = [torch.empty(share, dtype=torch.uint8) for _ in range(2)]
    with progress_bar(progress, total, "Verifying") as bar:
        for batch in _batches(comparable, share):
            todo = [block for block in batch if block.name not in found.values]
            for block, left, right in _read(todo, buffers, share, threads):
                difference = _first_difference(block, left, right)
                if difference is not None and block.name not in found.values:
                    found.values[block.name] = difference
            if bar is not None:
                bar.update(sum(block.nbytes for block in batch))
    return found


@dataclass(frozen=True, slots=True)
class _Block:
    """A piece of two tensors: where it starts in them, and both sides of it."""

    name: str
    corner: tuple[int, ...]
    sides: tuple[torch.Tensor, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return self.sides[0].numel() * self.sides[0].itemsize


def _batches(pairs: Mapping[str, tuple[LazyTensor, LazyTensor]], limit: int) -> Iterator[list[_Block]]:
    """Blocks of at most `limit` bytes, where they can be cut, in batches of at most `limit` bytes if of several."""
    batch: list[_Block] = []
    nbytes = 0
    for name, (x, y) in pairs.items():
        # Cut in pieces, a deferred operation would run once for each.
        most = x.numel() if working_set([x, y]) else limit // x.itemsize
        for corner, piece in _pieces(tuple(x.shape), max(1, most)):
            block = _Block(name, corner, (x[piece], y[piece]))
            if batch and (nbytes + block.nbytes > limit or len(batch) == _BLOCKS):
                yield batch
                batch, nbytes = [], 0
            batch.append(block)
            nbytes += _aligned(block.nbytes)
    yield batch


def _read(
    blocks: list[_Block], buffers: list[torch.Tensor], buffer_size: int, threads: int | None
) -> Iterator[tuple[_Block, torch.Tensor, torch.Tensor]]:
    """Both sides of each block, in the buffers as far as they go; they are gone with the next call."""
    reals: list[list[torch.Tensor]] = [[], []]
    jobs = []
    at = 0
    for block in blocks:
        for side, buffer, real in zip(block.sides, buffers, reals, strict=True):
            room = buffer[at : at + block.nbytes]
            if len(room) < block.nbytes:  # an operation's whole result, or an element larger than the buffer
                room = torch.empty(block.nbytes, dtype=torch.uint8)
            real.append(room.view(side.dtype).view(side.shape))
            jobs.append((side, Region.of(real[-1]), block.name))
        at += _aligned(block.nbytes)
    write_into(jobs, buffer_size=buffer_size, threads=threads)
    return zip(blocks, *reals, strict=True)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _first_difference(block: _Block, left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    a, b = _bytes(left), _bytes(right)
    if torch.equal(a, b):
        return None
    place = int((a != b).view(torch.uint8).argmax()) // left.itemsize
    index, rest = [], place
    for size in reversed(left.shape):
        index.append(rest % size)
        rest //= size
    return Difference(
        tuple(at + start for at, start in zip(reversed(index), block.corner, strict=True)),
        _element(left, place),
        _element(right, place),
        (_bits(a, left.itemsize, place), _bits(b, left.itemsize, place)),
    )


def _pieces(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Row-major blocks of at most `limit` elements that cover `shape`: the first index, and the slices, of each."""
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    rest = math.prod(shape[1:])
    if rest <= limit:
        rows = limit // rest
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            yield (start, *(0 for _ in shape[1:])), (slice(start, stop), *(slice(None) for _ in shape[1:]))
        return
    for row in range(shape[0]):
        for corner, piece in _pieces(shape[1:], limit):
            yield (row, *corner), (slice(row, row + 1), *piece)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _bits(flat: torch.Tensor, itemsize: int, place: int) -> str:
    return bytes(reversed(flat[place * itemsize : (place + 1) * itemsize].tolist())).hex()


def _element(tensor: torch.Tensor, place: int) -> Element:
    element = tensor.detach().reshape(-1)[place]
    if element.dtype == torch.float4_e2m1fn_x2:
        element = element.view(torch.uint8)  # two numbers in a byte
    value: Element = element.item()
    return value
