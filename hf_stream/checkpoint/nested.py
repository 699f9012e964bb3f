"""Save and open nested states: dicts, lists and tuples with tensors at the leaves, optimizer states for one.

The tensors make an ordinary safetensors checkpoint, named by their paths in the nesting. The structure and all plain
values are JSON in the metadata of its headers; if they are too large for that, in a tensor of bytes. No pickle.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from hf_stream.checkpoint.beside import open_beside
from hf_stream.checkpoint.files import CheckpointFiles
from hf_stream.checkpoint.nested_leaves import ARRAY, LeafReader, LeafWriter
from hf_stream.checkpoint.nested_structure import (
    STATE_FILE,
    STRUCTURE,
    STRUCTURE_TENSOR,
    read_structure,
    structure_metadata,
)
from hf_stream.checkpoint.nested_walk import first_difference, load_state
from hf_stream.checkpoint.open import Checkpoint, open_checkpoint
from hf_stream.checkpoint.paths import given_path, place_of
from hf_stream.checkpoint.recovery import check_settled
from hf_stream.checkpoint.save import finish, reserve
from hf_stream.checkpoint.staging import Staging
from hf_stream.checkpoint.state_files import is_structured, open_safetensors_state, open_state
from hf_stream.checkpoint.torch_nesting import open_torch_file
from hf_stream.checkpoint.weight_files import TORCH_SUFFIXES
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.errors import CheckpointError, FormatError
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.foreign import unwritten
from hf_stream.formats.nested import decode_structure, encode_structure
from hf_stream.formats.regular_files import opening
from hf_stream.formats.shards import shard_pattern
from hf_stream.lazy import materialize, write_into
from hf_stream.utils.sizes import nbytes_of

_INDEX: Final = STATE_FILE + ".index.json"
_OURS: Final = object()


def save_nested(
    state: object,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    durable: bool | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> Path:
    """Save a nested state without pickle, straight from where its tensors are.

    `open_nested` and `load_nested` give back the same nesting: dicts (in their order, with keys of any plain type),
    OrderedDicts, Counters, lists and tuples; None, bools, ints, floats to the last bit, complex numbers, text, bytes;
    torch's sizes, dtypes and devices; numpy arrays and scalars; tensors and parameters. What would come back as
    something else is refused: objects, and subclasses such as namedtuples and defaultdicts. Tensors come back
    contiguous (expanded ones expanded), those that share memory share it again, and each byte is written once; a dict,
    list or tuple that is in several places comes back as several. The files are ordinary safetensors files in
    which the tensors are named by their paths, such as "state/0/exp_avg".

    The destination appears complete or not at all, also where it replaces an older one.

    Args:
        state: The nesting. LazyTensors in it are streamed; they may come from the very files that are replaced.
        path: A path that ends in .safetensors for one file; any other for a directory.
        max_shard_size: For directories: bytes, or a string such as "2GB"; 5 GB by default.
        durable: Whether to wait until everything is on the disk, so that it outlives a loss of power. None: yes, unless
            the environment has HF_STREAM_DURABLE=0.
        buffer_size: Bytes in flight, at most, also as "64MB"; the inputs of one deferred operation come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        The path.

    Raises:
        FormatError: A value or a key would not come back as it is, or safetensors cannot hold a tensor's dtype. Names
            the place in the nesting, such as 'state/0/exp_avg'. Nothing has been written then.
        CheckpointError: A tensor has no data of its own (meta, sparse, a subclass), or the destination cannot be used.
        CopyError: Reading or writing failed. The destination is as it was.

    >>> state = {"state": {0: {"exp_avg": torch.ones(2)}}, "betas": (0.9, 0.999)}
    >>> path = hf_stream.save_nested(state, "optimizer.safetensors")
    >>> hf_stream.load_nested(path)
    {'state': {0: {'exp_avg': tensor([1., 1.])}}, 'betas': (0.9, 0.999)}
    """
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    place, file = place_of(path)
    if fact := unwritten(path):
        raise CheckpointError(fact)
    with collector_paused():
        writer = LeafWriter()
        tree = encode_structure(state, writer)
        tensors = writer.place()
        metadata = structure_metadata(tree, tensors)
        files = CheckpointFiles.plan(
            tensors,
            max_shard_size=max_shard_size,
            metadata=metadata,
            file=file,
            pattern=shard_pattern(STATE_FILE),
        )
    staging = Staging(place, file=file, durable=durable)
    try:
        jobs = [(tensors[name], region, name) for name, region in reserve(staging, files).items()]
        write_into(jobs, buffer_size=buffer_size, progress=progress, desc="Saving")
        finish(staging, files)
    except BaseException:
        staging.abandon()
        raise
    return Path(path)


def open_nested(path: str | os.PathLike[str], *, prefer_safetensors: bool = True, skip_unreadable: bool = False) -> Any:
    """Open a nested state: what `save_nested` or torch.save wrote, or OLMo to safetensors; reads headers and values.

    Args:
        path: The file or the directory. What is in a safetensors file says who wrote it.
        prefer_safetensors: Whether to read, in the place of a file of torch.save, the safetensors file of the same name
            beside it, if that was made of it (or, where it does not say so, is not older) and holds the same tensors
            and values by their types and shapes. If the file itself is not there, the other one is read.
        skip_unreadable: Whether to leave out, with a warning, what is neither a tensor with plain bytes nor a plain
            value, instead of refusing the file: objects and sparse tensors in a file of torch.save (in lists and
            tuples None takes their places), values of OLMo that are pickles of such.

    Returns:
        The nesting, with LazyTensors at its leaves. The same tensor in two places is the same LazyTensor; views that
        shared memory are views of one file, and are read apart. Numpy arrays are private mappings of the file, read
        when they are used. From a file of OLMo come dicts in dicts, in the order of the file, and none that was empty.

    Raises:
        FormatError: A header, an index, a structure or a pickle is not what its format says, or holds what is no data.
        CheckpointError: There is nothing to open, it is not whole, or it is no nested state.
    """
    with opening(path):
        source, state = _find(given_path(path), prefer_safetensors, skip_unreadable)
    if state is not _OURS:
        return state
    checkpoint, tree = _open(source)
    return _build(checkpoint, tree, LeafReader(checkpoint, _mapped_array))


def load_nested(
    path: str | os.PathLike[str],
    device: torch.device | str | None = None,
    *,
    prefer_safetensors: bool = True,
    skip_unreadable: bool = False,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> Any:
    """Load what `open_nested` opens, all tensors at once and in parallel.

    Args:
        path: The file or the directory.
        device: Where to put the tensors; the CPU by default, wherever they were.
        prefer_safetensors: As for `open_nested`.
        skip_unreadable: As for `open_nested`.
        buffer_size: Bytes in flight beyond the result, at most, also as text such as "64MB".
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        The nesting. Tensors and numpy arrays that shared memory share it again (arrays and tensors with each other on
        the CPU only).

    Raises:
        FormatError: A header, an index, a structure or a pickle is not what its format says, or holds what is no data.
        CheckpointError: There is nothing to open, it is not whole, or it is no nested state.
        CopyError: Reading failed.
    """
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    with opening(path):
        source, state = _find(given_path(path), prefer_safetensors, skip_unreadable)
    if state is not _OURS:
        return load_state(state, device, buffer_size=buffer_size, progress=progress)
    checkpoint, tree = _open(source)
    reader = LeafReader(checkpoint, _no_array)
    _build(checkpoint, tree, reader)  # nothing is read before all of it is known to be right
    lazies = {
        name: checkpoint[name] if device is None or tags == {ARRAY} else checkpoint[name].to(device)
        for name, tags in reader.names.items()
    }
    tensors = materialize(lazies, buffer_size=buffer_size, progress=progress, desc="Loading")
    return decode_structure(tree, LeafReader(tensors, lambda tensor: tensor.cpu().numpy()))


def _find(path: Path, prefer_safetensors: bool, skip_unreadable: bool) -> tuple[Path, Any]:
    """The path to read, and the nesting there, or `_OURS` if `save_nested` wrote it."""

    def state_of(file: Path) -> Any:
        return open_safetensors_state(file, skip_unreadable=skip_unreadable)

    def torch_state_of(file: Path) -> Any:
        return open_torch_file(file, skip_unreadable=skip_unreadable)

    if path.suffix in TORCH_SUFFIXES and not path.is_dir():
        beside = prefer_safetensors and open_beside(path, state_of, torch_state_of, first_difference)
        if beside:
            other, state = beside
            return other, _OURS if is_structured(other) else state
    opened = open_state(path, skip_unreadable=skip_unreadable) if path.is_file() else None
    return path, _OURS if opened is None else opened.state


def _open(path: str | os.PathLike[str]) -> tuple[Checkpoint, Any]:
    """The checkpoint, and the structure's tree."""
    source = Path(path)
    if source.is_dir():
        check_settled(source)
        # Other checkpoints, a model's, may be beside it.
        source = next((source / name for name in (STATE_FILE, _INDEX) if (source / name).exists()), source)
    checkpoint = open_checkpoint(source)
    texts = {file.metadata.get(STRUCTURE) for file in checkpoint.files.values()} or {None}
    if len(texts) > 1:
        raise CheckpointError(f"'{path}': the files belong to different states; get all of them again")
    text = texts.pop()
    if text is None:
        raise CheckpointError(
            f"'{path}' has tensors but no structure: neither save_nested nor OLMo made it; use open_checkpoint for its "
            f"{len(checkpoint)} tensors by name"
        )
    try:
        return checkpoint, read_structure(text, checkpoint)
    except FormatError as error:
        raise FormatError(f"'{path}': {error}") from None


def _build(checkpoint: Checkpoint, tree: Any, reader: LeafReader) -> object:
    """The nesting, which must have a place for each tensor of the files."""
    try:
        state = decode_structure(tree, reader)
        left_over = checkpoint.keys() - reader.names.keys() - {STRUCTURE_TENSOR}
        if left_over:
            raise FormatError(
                f"{len(left_over)} tensors have no place in the structure, {min(left_over)!r:.200} for one. "
                "The file was changed by something that does not know of its structure: get it again."
            )
    except FormatError as error:
        raise FormatError(f"'{checkpoint.path}': {error}") from None
    return state


def _mapped_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return materialize([tensor], alias=True)[0].numpy()


def _no_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """One of the same dtype, for checks alone."""
    return torch.empty(0, dtype=tensor.dtype).numpy()
