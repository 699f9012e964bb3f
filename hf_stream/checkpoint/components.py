"""Repositories of several checkpoints: pipelines of diffusers, sentence-transformers with trained modules.

Their tensors are named after the folders that they are in: "text_encoder/shared.weight". Those of the repository's own
directory have no folder before their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from hf_stream.checkpoint.files import CheckpointFiles, ShardFile, either
from hf_stream.checkpoint.manifests import checkpoint_folders, in_words, inside, manifests
from hf_stream.checkpoint.mapping import SAFETENSORS, AnyLayout, FileFormat
from hf_stream.checkpoint.open import Checkpoint, open_checkpoint
from hf_stream.checkpoint.recovery import check_settled
from hf_stream.checkpoint.torch_state import Key
from hf_stream.errors import CheckpointError, LayoutError


def open_components(directory: Path) -> dict[str, Checkpoint]:
    """The checkpoints that a repository is made of, by folder, "" for its own directory; nothing if it is just one.

    Raises:
        FormatError, CheckpointError: One cannot be opened, a component is missing, or what lists them is no such list.
    """
    if not manifests(directory):
        return {}
    check_settled(directory)
    folders = checkpoint_folders(directory)
    opened = {}
    for folder in folders if any(folders) else ():
        try:
            opened[folder] = open_checkpoint(directory / folder, prefer_safetensors=False)
        except CheckpointError as error:
            raise CheckpointError(
                f"'{directory}' is made of several checkpoints ({in_words(folders)}), and one cannot be opened: {error}"
            ) from error
    return opened


def open_repository(path: Path, key: Key | None = None) -> Checkpoint:
    """What `open_checkpoint` opens and, where that is a repository of several checkpoints, all of them."""
    components = {} if key is not None else open_components(path)
    return joined(components) if components else open_checkpoint(path, key=key, prefer_safetensors=False)


def apart(tensors: Mapping[str, torch.Tensor]) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """The tensors of a repository's own directory, which a layout is for, and those of its other components."""
    if not isinstance(tensors, Checkpoint) or not any(map(tensors.folder_of, tensors)):
        return tensors, {}  # a checkpoint itself says which names are like one that it has not
    own: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        (others if tensors.folder_of(name) else own)[name] = tensor
    return own, others


def check_components(
    path: Path,
    components: Mapping[str, Checkpoint],
    *,
    file: str | None,
    key: Key | None,
    layout: AnyLayout | None,
    format: FileFormat,
) -> None:
    """Refuse what cannot be done to several checkpoints at once; arguments as those of `convert`.

    Raises:
        CheckpointError, LayoutError: It cannot; says why.
    """
    made_of = f"'{path}' is made of {len(components)} checkpoints ({in_words(components)})"
    if file is not None:
        raise CheckpointError(f"{made_of}, and '{file}' is one file; give a directory, or convert one of them")
    if key is not None or format != SAFETENSORS:
        what = "key=" if key is not None else f"format='{format}'"
        raise CheckpointError(f"{made_of}, and {what} is for one; convert the directory or the file of that one")
    if layout is not None and "" not in components:
        raise LayoutError(f"{made_of}, and layout= is for one; convert the directory of that one")


def joined(components: Mapping[str, Checkpoint]) -> Checkpoint:
    """The tensors of all components as one checkpoint; a single one as it is."""
    if components.keys() == {""}:
        return components[""]
    files, opened, weight_map = {}, {}, {}
    for folder, checkpoint in components.items():
        path = checkpoint.path if not folder else checkpoint.path.parents[folder.count("/")]
        for name, file in checkpoint.files.items():
            files[inside(folder, name)] = Path(file.storage.path)
            opened[inside(folder, name)] = file
        weight_map.update({inside(folder, name): inside(folder, checkpoint.file_of(name)) for name in checkpoint})
    return Checkpoint(path, files, weight_map, opened=opened, in_folders=True)


def in_folder(folder: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names that they have in the whole repository."""
    return {inside(folder, name): tensor for name, tensor in tensors.items()}


def files_together(files: Mapping[str, CheckpointFiles], source: Checkpoint) -> CheckpointFiles:
    """All files of a repository, from those of each component, by folder; those of a single one as they are.

    Args:
        files: Of each component.
        source: The repository that they are made of.
    """
    if files.keys() == {""}:
        return files[""]
    shards = tuple(_shard_in(folder, shard) for folder, own in files.items() for shard in own.shards)
    small = {inside(folder, name): content for folder, own in files.items() for name, content in own.small.items()}
    families = [
        re.compile(re.escape(inside(folder, "")) + f"(?:{own.family.pattern})") for folder, own in files.items()
    ]
    return CheckpointFiles(shards, small, manifests(source.location)[0], either(*families))


def _shard_in(folder: str, shard: ShardFile) -> ShardFile:
    """A shard as the repository calls it and its tensors; what is written in it stays as it is."""
    tensors = {inside(folder, name): info for name, info in shard.header.tensors.items()}
    return replace(shard, name=inside(folder, shard.name), header=replace(shard.header, tensors=tensors))
