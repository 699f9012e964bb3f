"""Convert a checkpoint on disk to another layout, dtype or sharding, shard by shard, so that it can be taken up again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_stream.checkpoint.files import DEFAULT_MAX_SHARD_SIZE, DEFAULT_PATTERN, CheckpointFiles
from hf_stream.checkpoint.open import Checkpoint, open_checkpoint
from hf_stream.checkpoint.staging import INSIDE, Staging
from hf_stream.checkpoint.verify import verify as verify_checkpoints
from hf_stream.checkpoint.writer import finish, reserve
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress, progress_bar
from hf_stream.errors import CheckpointError
from hf_stream.formats.collector import collector_paused
from hf_stream.lazy import fingerprint, reads, working_set, write_into

AnyLayout = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

# Weights in any format, and their indices; everything else beside a checkpoint is carried along.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".index.json")
_SUFFIX = ".safetensors"
_CONFIG = "config.json"


@dataclass(frozen=True)
class Conversion:
    """What a conversion reads and writes, known from headers alone.

    Attributes:
        source: The checkpoint that is read.
        tensors: The tensors to write, by name, none of them loaded.
        files: The weight files to write.
        carried: Other files of the source directory that go along.
        dtype: What floating-point tensors become, or None.
    """

    source: Checkpoint
    tensors: Mapping[str, torch.Tensor]
    files: CheckpointFiles
    carried: tuple[Path, ...]
    dtype: torch.dtype | None

    def nbytes_read(self) -> dict[str, int]:
        """Bytes to read of each source file, by path."""
        nbytes = {storage.name: 0 for storage in self.source.storages.values()}
        for region in reads(self.tensors.values()):
            nbytes[region.storage.name] = nbytes.get(region.storage.name, 0) + region.nbytes
        return nbytes

    def peak_nbytes(self, buffer_size: int = DEFAULT_BUFFER_SIZE) -> int:
        """Anonymous memory needed at most, beyond the program itself: the buffer and one deferred operation."""
        return buffer_size + working_set(self.tensors.values())

    def fingerprint(self) -> str:
        """What the files will hold, as a hash: of headers, expressions and the source files' identities."""
        digest = hashlib.sha256(fingerprint(self.tensors.values()).encode())
        for shard in self.files.shards:
            digest.update(shard.prefix)
        return digest.hexdigest()


def plan_conversion(
    source: str | os.PathLike[str] | Checkpoint,
    *,
    layout: AnyLayout | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    pattern: str = DEFAULT_PATTERN,
) -> Conversion:
    """Work out what `convert` would do; reads headers only. Arguments and errors as there."""
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    with collector_paused():
        tensors = dict(checkpoint if layout is None else layout(checkpoint))
        if dtype is not None:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        files = CheckpointFiles.plan(
            tensors, max_shard_size=max_shard_size, metadata=checkpoint.metadata, pattern=pattern
        )
    return Conversion(checkpoint, tensors, files, tuple(_carried(checkpoint.path)), dtype)


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    layout: AnyLayout | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    resume: bool = True,
    verify: bool = False,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> Path:
    """Convert a checkpoint without loading it.

    The destination appears when everything is written, and not before. What lies beside the source's weights (config,
    tokenizer, ...) goes along; with `dtype`, the config's entry is changed to it.

    Args:
        source: What `open_checkpoint` takes, or what it gave.
        destination: A directory, or a path that ends in .safetensors for one file and nothing else.
        layout: Any callable from named tensors to named tensors; None keeps names and shapes.
        dtype: What floating-point tensors become; None keeps them.
        max_shard_size: Bytes, or a string such as "5GB".
        resume: Whether to take up a run that was cut short, if it was to write the very same: shards that it finished are
            kept. Without it, and after any change of the source or the layout, everything is written anew.
        verify: Whether to read both sides once more and compare them bit for bit before the destination appears.
        buffer_size: Bytes in flight, at most; the inputs of one deferred operation come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        The destination.

    Raises:
        FormatError, LayoutError, CheckpointError: The source, the layout or the destination cannot be used; nothing has
            been written then.
        CopyError: Reading or writing failed. Finished shards are kept for the next run if `resume`.
    """
    target = Path(destination)
    single = target.suffix == _SUFFIX
    if single:
        conversion = plan_conversion(
            source, layout=layout, dtype=dtype, max_shard_size=2**63, pattern=target.stem + "{suffix}" + _SUFFIX
        )
        directory = target.parent
    else:
        conversion = plan_conversion(source, layout=layout, dtype=dtype, max_shard_size=max_shard_size)
        directory = target
    if not conversion.tensors:
        raise CheckpointError(f"nothing to write to '{target}': the layout leaves none of the source's tensors")
    staging = Staging(directory, conversion.fingerprint() if resume else None)
    try:
        _write_shards(staging, conversion, buffer_size, progress)
        if not single:
            _carry(staging, conversion)
        if verify:
            written = {shard.name: staging.path / shard.name for shard in conversion.files.shards}
            differences = verify_checkpoints(Checkpoint(staging.path, written), conversion.tensors, progress=progress)
            if differences:
                raise CheckpointError(f"'{target}' would differ from what was to be written:\n{differences}")
    except BaseException:
        staging.abandon(keep=resume)
        raise
    finish(staging, conversion.files)
    return target


def _write_shards(staging: Staging, conversion: Conversion, buffer_size: int, progress: bool | Progress | None) -> None:
    regions = reserve(staging, conversion.files)
    todo = [shard for shard in conversion.files.shards if shard.name not in staging.finished]
    total = sum(info.nbytes for shard in todo for info in shard.header.tensors.values())
    with progress_bar(progress, total, "Converting") as bar:
        for shard in todo:
            jobs = [(conversion.tensors[name], regions[name], name) for name in shard.header.tensors]
            write_into(jobs, buffer_size=buffer_size, progress=bar or False)
            staging.finish(shard.name)


def _carried(path: Path) -> Iterator[Path]:
    """Small files beside the weights."""
    if not path.is_dir():
        return
    for entry in sorted(path.iterdir()):
        if entry.name != INSIDE and not entry.name.startswith(".git") and not entry.name.endswith(_WEIGHTS):
            yield entry


def _carry(staging: Staging, conversion: Conversion) -> None:
    for entry in conversion.carried:
        if entry.is_dir():
            shutil.copytree(entry, staging.path / entry.name, dirs_exist_ok=True)
        elif entry.name == _CONFIG and conversion.dtype is not None:
            staging.write(_CONFIG, _with_dtype(entry.read_bytes(), conversion.dtype))
        else:
            shutil.copyfile(entry, staging.path / entry.name)


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """A transformers config whose dtype entry, under its new or its old name, says what the weights are now."""
    entries = json.loads(config)
    for key in ("dtype", "torch_dtype"):
        if key in entries:
            entries[key] = str(dtype).removeprefix("torch.")
    return (json.dumps(entries, indent=2, sort_keys=True) + "\n").encode()
