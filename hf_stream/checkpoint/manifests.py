"""Which folders of a repository hold its checkpoints, as diffusers and sentence-transformers list them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from hf_stream.checkpoint.folder import is_inside
from hf_stream.errors import CheckpointError
from hf_stream.formats import is_weight_file
from hf_stream.formats.regular_files import read_json, read_json_object

_PIPELINE: Final = "model_index.json"
_MODULES: Final = "modules.json"
_ROUTER: Final = "router_config.json"
_MANIFESTS: Final = (_PIPELINE, _MODULES, _ROUTER)
_OF_TORCH: Final = re.compile(r".*\.safetensors|pytorch_model.*\.bin", re.DOTALL)
# Folders within folders, and as many as no repository has.
_DEPTH: Final = 4


def manifests(directory: Path) -> list[str]:
    """The files in a directory that list folders."""
    return [name for name in _MANIFESTS if (directory / name).is_file()]


def checkpoint_folders(directory: Path) -> list[str]:
    """The folders that hold checkpoints, "" being the directory itself; nothing where no file lists them.

    Raises:
        CheckpointError: One is missing or elsewhere, some are not listed, or what lists them is no list.
    """
    return list(dict.fromkeys(_folders(directory, "", _DEPTH))) if manifests(directory) else []


def inside(folder: str, name: str) -> str:
    """What a file or a folder in a folder is called from outside."""
    return f"{folder}/{name}" if folder else name


def in_words(folders: Iterable[str]) -> str:
    """Folders in words."""
    return ", ".join(f"'{folder or '.'}'" for folder in folders)


def _folders(directory: Path, folder: str, depth: int) -> Iterator[str]:
    """The folders below `folder` that hold checkpoints, itself included, as the files that list them say."""
    place, top = directory / folder, os.path.realpath(directory)
    found = manifests(place) if depth else []
    if not found:
        if deeper := _weights_below(place):
            raise CheckpointError(
                f"'{deeper}' belongs to '{folder}' in a way that is not known; convert each checkpoint by itself"
            )
        if _has_weights(place):
            yield folder
    for manifest in found:
        for name in dict.fromkeys(_listed(place / manifest)):
            inner = inside(folder, name)
            if not name:
                if _has_weights(place):
                    yield folder
            elif not is_inside(name) or os.path.realpath(directory / inner) != os.path.join(top, inner):
                raise CheckpointError(
                    f"'{place / manifest}' lists {name!r:.200}, which is no folder inside; copy it there"
                )
            elif (directory / inner).is_dir():
                yield from _folders(directory, inner, depth - 1)
            elif manifest == _PIPELINE:
                raise CheckpointError(f"'{place / manifest}' lists '{name}', which is missing; get the rest of it")


def _listed(manifest: Path) -> Iterator[str]:
    """The folders that a manifest lists; "" is its own."""
    if manifest.name == _PIPELINE:
        for name, library in read_json_object(manifest).items():
            if isinstance(library, list) and any(library) and not name.startswith("_"):
                yield name
        return
    content: Any = read_json(manifest)
    if manifest.name == _ROUTER:
        content = content.get("types") if isinstance(content, dict) else None
        entries = list(content) if isinstance(content, dict) else None
    else:
        entries = content if isinstance(content, list) else None
        entries = entries and [entry.get("path") if isinstance(entry, dict) else None for entry in entries]
    if entries is None or not all(isinstance(entry, str) for entry in entries):
        raise CheckpointError(f"'{manifest}' is no list of modules; get the file again")
    yield from entries


def _has_weights(folder: Path) -> bool:
    return any(is_weight_file(name) and not name.startswith(".") for name in os.listdir(folder))


def _weights_below(folder: Path) -> Path | None:
    """Weights of torch in a folder of a folder."""
    found = (path for path in sorted(folder.rglob("*/*")) if _OF_TORCH.fullmatch(path.name))
    return next(found, None)
