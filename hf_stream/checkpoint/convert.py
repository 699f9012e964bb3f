"""Convert a checkpoint on disk to another layout, dtype or sharding: shard by shard, and resumable."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hf_stream.checkpoint.archives import close_archives, plan_archives
from hf_stream.checkpoint.carried import carry, find_carried, left_behind
from hf_stream.checkpoint.casting import cast, cast_target
from hf_stream.checkpoint.components import check_components, files_together, in_folder, joined, open_components
from hf_stream.checkpoint.conversion import Conversion, Outcome
from hf_stream.checkpoint.files import (
    DEFAULT_MAX_SHARD_SIZE,
    CheckpointFiles,
    ShardFile,
)
from hf_stream.checkpoint.manifests import inside
from hf_stream.checkpoint.mapping import (
    SAFETENSORS,
    TORCHSCRIPT,
    AnyLayout,
    FileFormat,
    bound,
    check_files,
    file_format_of,
    map_tensors,
)
from hf_stream.checkpoint.matches import Matches
from hf_stream.checkpoint.nested_conversion import open_nesting
from hf_stream.checkpoint.open import Checkpoint, open_checkpoint
from hf_stream.checkpoint.paths import given_path
from hf_stream.checkpoint.planned_files import plan_files, plan_nesting_files
from hf_stream.checkpoint.save import reserve
from hf_stream.checkpoint.selection import select_names
from hf_stream.checkpoint.staging import Staging
from hf_stream.checkpoint.torch_state import Key
from hf_stream.checkpoint.verify import Differences
from hf_stream.checkpoint.verify import verify as verify_checkpoints
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress, progress_bar
from hf_stream.copying.region import Region
from hf_stream.errors import CheckpointError
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.foreign import unwritten
from hf_stream.lazy import write_into
from hf_stream.storage.durability import drop_pages, flush
from hf_stream.utils.sizes import nbytes_of

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".json"

_LISTED = 5
# What files of one tensor each are written in: enough for all threads, and little to do again after a crash.
_BATCH_NBYTES = 64 << 20

logger = logging.getLogger(__name__)


def plan_conversion(
    source: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str] | None = None,
    *,
    key: Key | None = None,
    layout: AnyLayout | None = None,
    config: object = None,
    allow_patterns: str | Sequence[str] | None = None,
    ignore_patterns: str | Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    format: FileFormat | None = None,
    nested: bool = False,
    skip_unreadable: bool = False,
) -> Conversion:
    """Work out what `convert` would do; reads headers only. Arguments and errors as there; by default a directory.

    What each rule of the layout has found is in `matches`; a rule that has found nothing is no error yet.
    """
    file = None if destination is None else _single_file(given_path(destination))
    dtype = None if dtype is None else cast_target(dtype)
    nbytes_of(max_shard_size, "max_shard_size")  # also of one file, which it has no meaning for
    of_weights = [
        what
        for what, value in (
            ("key", key),
            ("layout", layout),
            ("allow_patterns", allow_patterns),
            ("ignore_patterns", ignore_patterns),
            ("dtype", dtype),
            ("format", format),
        )
        if value is not None
    ]
    format = _file_format(format, layout, destination if file else None)
    if format == SAFETENSORS and destination is not None and (fact := unwritten(destination)):
        raise CheckpointError(fact)
    if nested and of_weights:
        raise CheckpointError(
            f"'{of_weights[0]}' is for named tensors, 'nested' for all that a file holds: choose one of them"
        )
    if isinstance(source, Checkpoint):
        if key is not None:
            raise CheckpointError(f"'{source.path}' is open already: pass the key to open_checkpoint")
        parts = {"": source}
    else:
        if nested or (file and not of_weights):
            nesting = open_nesting(given_path(source), skip_unreadable=skip_unreadable)
            if nesting is not None:
                files = plan_nesting_files(nesting, file, max_shard_size)
                whole = bool(nesting.metadata)
                return Conversion(nesting.source, nesting.tensors, files, (), None, file, nested=whole)
        parts = open_components(given_path(source))
        if parts:
            check_components(Path(source), parts, file=file, key=key, layout=layout, format=format)
        else:
            opened = open_checkpoint(source, key=key, prefer_safetensors=False, skip_unreadable=skip_unreadable)
            parts = {"": opened}
    with collector_paused():
        checkpoint = joined(parts)
        layout = None if layout is None else bound(layout, parts.get("", checkpoint), config)
        names = select_names(checkpoint, allow_patterns, ignore_patterns, where=checkpoint.path)
        selected = set(names)
        tensors: dict[str, torch.Tensor] = {}
        planned: dict[str, CheckpointFiles] = {}
        matches = Matches()
        for folder, part in parts.items():
            # A checkpoint itself says which names are like one that it has not.
            own: Mapping[str, torch.Tensor] = part
            if names is not checkpoint:
                own = {name: part[name] for name in part if inside(folder, name) in selected}
            own_layout = None if folder else layout
            if own_layout is not None:
                own, matches = map_tensors(own_layout, own)
            if dtype is not None:
                own = cast(own, dtype, part, own_layout)
            if format == TORCHSCRIPT:
                check_files(layout, own)
                planned[folder] = plan_archives(own)
            elif own or not folder:
                planned[folder] = plan_files(own, part, file, max_shard_size, own_layout)
            tensors.update(in_folder(folder, own))
    files, folders = files_together(planned, checkpoint), tuple(parts)
    conversion = Conversion(
        checkpoint, tensors, files, (), dtype, file, layout, format, matches=matches, folders=folders
    )
    if checkpoint.location.is_dir() or checkpoint.path.suffix == _INDEX_SUFFIX:  # who names one file means one file
        conversion = dataclasses.replace(
            conversion, carried=tuple(find_carried(conversion.directory, same_layout=layout is None))
        )
    return conversion


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    key: Key | None = None,
    layout: AnyLayout | None = None,
    config: object = None,
    allow_patterns: str | Sequence[str] | None = None,
    ignore_patterns: str | Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    format: FileFormat | None = None,
    nested: bool = False,
    skip_unreadable: bool = False,
    strict: bool = False,
    resume: bool = True,
    verify: bool = False,
    durable: bool | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    threads: int | None = None,
    progress: bool | Progress | None = None,
) -> Path:
    """Convert a checkpoint without loading it.

    The destination appears when everything is written, and not before; its weights, if it has some, are replaced then.
    What lies beside the source's weights (config, tokenizer, ...) goes along, unless the source or the destination is a
    single file; if most of the weights get a new dtype, the config says so, and it changes with a layout that has a
    `new_config`. The source cannot be the destination.

    Weights are called as before: `adapter_model`, `diffusion_pytorch_model.fp16` and so on. A directory that lists
    several checkpoints in its folders, such as a pipeline of diffusers (`model_index.json`) or a model of
    sentence-transformers (`modules.json`), is converted with all of them or not at all; a layout is for the one in the
    directory itself.

    A file of torch.save, or a safetensors file of OLMo, becomes one .safetensors file as a whole: an ordinary one if it
    is a flat dict of tensors, else one as `save_nested` writes, for `open_nested` and `load_nested`. Given a key, a
    layout or a dtype, or a directory to write to, its named tensors are taken alone, as `open_checkpoint` finds them.

    Args:
        source: What `open_checkpoint` takes, or what it gave. The very file that is named is read, none beside it.
        destination: A directory, or a path that ends in .safetensors for one file and nothing else.
        key: Where the tensors are, as for `open_checkpoint`.
        layout: Any callable from named tensors to named tensors; None keeps names and shapes.
        config: The model's config, for sizes that the layout does not have: an object, a dict, the path of a file, or a
            model. None: the one beside the source.
        allow_patterns: Which of the source's tensors are taken, by name: one pattern or several, as `fnmatch` has them.
            None takes all.
        ignore_patterns: Which of these are left out. A pattern of either kind that matches nothing is an error.
        dtype: What floating-point tensors become, such as torch.bfloat16 or "bf16"; None keeps them. Where a
            config.json beside the source names a model of transformers, tensors that this keeps in another dtype
            (float32, as a rule) are kept in that. A quantized checkpoint is refused, unless the layout dequantizes it.
        max_shard_size: Bytes, or a string such as "5GB".
        format: "safetensors", or "torchscript" for a TorchScript archive of each tensor, as SwiftTransformer loads
            them; `max_shard_size` means nothing there. None: what is natural for the layout, which is "torchscript"
            for `swift_transformer` and "safetensors" for all others.
        nested: Whether to write all that a file of torch.save or of OLMo holds into a directory as well.
        skip_unreadable: Whether to leave out, with a warning, what is neither a tensor nor a plain value in a file of
            torch.save or OLMo, as `open_checkpoint` and `open_nested` do.
        strict: Whether a rule of the layout that finds nothing is an error, and not a warning.
        resume: Whether to take up a run that was cut short, if it was to write the very same: shards that it finished
            are kept. Without it, and after any change of the source or the layout, everything is written anew.
        verify: Whether to read both sides once more, the new files from the disk, and compare them bit for bit before
            the destination appears.
        durable: Whether to wait until everything is on the disk, so that it outlives a loss of power. None: yes, unless
            the environment has HF_STREAM_DURABLE=0.
        buffer_size: Bytes in flight, at most, also as "64MB"; the inputs of one deferred operation come on top.
        threads: Threads that move bytes; by default one for each core, and at most four.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        The destination.

    Raises:
        FormatError, LayoutError, CheckpointError: The source, the layout or the destination cannot be used; nothing has
            been written then.
        CopyError: Reading or writing failed; finished shards are kept for the next run if `resume`. Or the source was
            changed meanwhile; nothing is kept then.
    """
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    given_path(destination)
    conversion = plan_conversion(
        source,
        destination,
        key=key,
        layout=layout,
        config=config,
        allow_patterns=allow_patterns,
        ignore_patterns=ignore_patterns,
        dtype=dtype,
        max_shard_size=max_shard_size,
        format=format,
        nested=nested,
        skip_unreadable=skip_unreadable,
    )
    run_conversion(
        conversion,
        destination,
        strict=strict,
        resume=resume,
        verify=verify,
        durable=durable,
        buffer_size=buffer_size,
        threads=threads,
        progress=progress,
    )
    return Path(destination)


def run_conversion(
    conversion: Conversion,
    destination: str | os.PathLike[str],
    *,
    strict: bool = False,
    resume: bool = True,
    verify: bool = False,
    durable: bool | None = None,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    threads: int | None = None,
    progress: bool | Progress | None = None,
) -> Outcome:
    """Do what was planned for this destination; arguments and errors as in `convert`."""
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    conversion.check_destination(destination)
    directory, file = conversion.directory_of(destination), conversion.file
    conversion.matches.report(strict=strict)
    _warn_of_others(conversion)
    staging = Staging(directory, conversion.fingerprint() if resume else None, file=file, durable=durable)
    keep = resume
    written: list[ShardFile] = []
    try:
        if not staging.completed:
            regions = reserve(staging, conversion.files)
            if file is None:
                carry(staging, conversion.directory, conversion.carried, conversion.new_configs)
                if conversion.carried:
                    conversion.source.check_in_place()
            written = _write_shards(
                staging, conversion.files, conversion.tensors, regions, buffer_size, threads, progress
            )
            staging.wait()
            wrong = verify and _differences(conversion, staging.path, buffer_size, threads, progress)
            if wrong:
                keep = False
                raise _would_differ(destination, wrong)
            keep = False  # what a source gave that has changed meanwhile is of no use
            conversion.source.check_unchanged()
            keep = resume
            staging.commit(entry=conversion.files.entry, stale=conversion.files.family if file is None else None)
        elif verify and (wrong := _differences(conversion, staging.directory, buffer_size, threads, progress)):
            raise _would_differ(destination, wrong)
    finally:
        staging.abandon(keep=keep)
    names = {shard.name for shard in written}
    reused = tuple(shard for shard in conversion.files.shards if shard.name not in names)
    return Outcome(tuple(written), reused, staging.replaced)


def _warn_of_others(conversion: Conversion) -> None:
    if conversion.source.location.is_dir():
        read = (storage.path for storage in conversion.source.storages.values())
        others = left_behind(conversion.source.location, read)
        if others:
            listed = ", ".join(f"'{name}'" for name in others[:_LISTED])
            logger.warning(
                "%s: %d other weight files are not converted and stay behind: %s",
                conversion.source.path,
                len(others),
                listed,
            )


def _file_format(
    wanted: FileFormat | None, layout: AnyLayout | None, file: str | os.PathLike[str] | None
) -> FileFormat:
    """The format to write; `file` if it is all to go into that one file."""
    if wanted not in (None, SAFETENSORS, TORCHSCRIPT):
        raise CheckpointError(f"format {wanted!r:.100} is not known; choose '{SAFETENSORS}' or '{TORCHSCRIPT}'")
    if file is not None:
        if wanted == TORCHSCRIPT:
            raise CheckpointError(
                f"'{os.fspath(file)}' is one safetensors file; give a directory for TorchScript files"
            )
        return SAFETENSORS
    return wanted or file_format_of(layout)


def _single_file(path: Path) -> str | None:
    return path.name if path.suffix == _SUFFIX else None


def _differences(
    conversion: Conversion,
    directory: Path,
    buffer_size: int,
    threads: int | None,
    progress: bool | Progress | None,
) -> Differences:
    files = {shard.name: directory / shard.name for shard in conversion.files.shards}
    for file in files.values():
        # What is compared is what the disk has, and not what memory still holds of it.
        flush(file)
        drop_pages(file)
    written = Checkpoint(directory, files, archives=conversion.format == TORCHSCRIPT, in_folders=True)
    return verify_checkpoints(written, conversion.tensors, buffer_size=buffer_size, threads=threads, progress=progress)


def _would_differ(destination: str | os.PathLike[str], differences: Differences) -> CheckpointError:
    return CheckpointError(
        f"'{os.fspath(destination)}' would differ from what was to be written:\n{differences}\n"
        "Check the disk, and that nothing writes to the source; then convert again"
    )


def _write_shards(
    staging: Staging,
    files: CheckpointFiles,
    tensors: Mapping[str, torch.Tensor],
    regions: Mapping[str, Region],
    buffer_size: int,
    threads: int | None,
    progress: bool | Progress | None,
) -> list[ShardFile]:
    todo = [shard for shard in files.shards if shard.name not in staging.finished]
    total = sum(info.nbytes for shard in todo for info in shard.header.tensors.values())
    with progress_bar(progress, total, "Converting") as bar:
        for batch in _batches(todo):
            jobs = [(tensors[name], regions[name], name) for shard in batch for name in shard.header.tensors]
            write_into(jobs, buffer_size=buffer_size, threads=threads, progress=bar or False)
            close_archives(
                (regions[name].storage, shard.archive)
                for shard in batch
                if shard.archive is not None
                for name in shard.header.tensors
            )
            for shard in batch:
                staging.finish(shard.name)
    return todo


def _batches(shards: Iterable[ShardFile]) -> Iterator[list[ShardFile]]:
    """Shards that are written together: safetensors files one by one, the small files of one tensor each in bunches."""
    batch: list[ShardFile] = []
    nbytes = 0
    for shard in shards:
        batch.append(shard)
        nbytes += shard.header.nbytes
        if shard.archive is None or nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
