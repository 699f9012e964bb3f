"""A safetensors file beside a file of torch.save: whether it is read in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hf_stream.checkpoint.origin import ORIGIN, origin_of
from hf_stream.checkpoint.weight_files import SAFETENSORS_SUFFIX, WeightFile
from hf_stream.errors import FormatError, HfStreamError
from hf_stream.formats import read_header
from hf_stream.storage.file import FileStorage

logger = logging.getLogger(__name__)

Opened = TypeVar("Opened")


def safetensors_beside(path: Path) -> Path | None:
    """`foo.safetensors` for `foo.pt`, if it was made of it or might be, or if `foo.pt` is not there.

    `convert` notes what it has read. Of a file without such a note only its age can tell: it must not be older.
    """
    other = path.with_suffix(SAFETENSORS_SUFFIX)
    if not other.is_file():
        return None
    if not path.exists():
        return other
    noted = _noted_origin(other)
    if noted is not None:
        with FileStorage(path) as storage:
            is_made_of_it = noted == origin_of(storage)
        if not is_made_of_it:
            logger.info(
                "'%s' was made of another '%s', or changed on the way, and is not read in its place", other, path.name
            )
            return None
    elif other.stat().st_mtime_ns < path.stat().st_mtime_ns:
        logger.info("'%s' is older than '%s', and is not read in its place", other, path.name)
        return None
    return other


def open_beside(
    path: Path,
    open_safetensors: Callable[[Path], Opened],
    open_torch: Callable[[Path], Opened],
    difference: Callable[[Opened, Opened], str | None],
) -> tuple[Path, Opened] | None:
    """Open what is beside a file of torch.save in its place, if it is the same by all that can be told without reading.

    A file of torch.save that cannot be opened itself is not compared.

    Args:
        path: The file of torch.save.
        open_safetensors: Opens the other one.
        open_torch: Opens the file itself.
        difference: Says how the second of two opened ones differs from the first, or None.

    Returns:
        What was opened and where, or None if the file itself is to be read.
    """
    other = safetensors_beside(path)
    if other is None:
        return None
    try:
        opened = open_safetensors(other)
    except HfStreamError as error:
        if not path.exists():
            raise
        # A key that leads nowhere is no fault of the file.
        level = logging.WARNING if isinstance(error, FormatError) else logging.INFO
        logger.log(level, "'%s' is not read in the place of '%s': %s", other, path.name, error)
        return None
    fact = _differs(path, opened, open_torch, difference)
    if fact is not None:
        logger.warning("'%s' is not read in the place of '%s', as it holds something else: %s", other, path.name, fact)
        return None
    logger.info("'%s' is read in the place of '%s'", other, path.name)
    return other, opened


def first_change(a: WeightFile, b: WeightFile) -> str | None:
    """How the names, types or shapes in the second file differ from those in the first, in words, or None."""
    there, here = ({name: file.facts(name) for name in file.names} for file in (a, b))
    for name, facts in there.items():
        if here.get(name) != facts:
            return f"'{name}' is {'another one' if name in here else 'missing'}"
    more = next((name for name in here if name not in there), None)
    return None if more is None else f"'{more}' is new"


def _differs(
    path: Path,
    opened: Opened,
    open_torch: Callable[[Path], Opened],
    difference: Callable[[Opened, Opened], str | None],
) -> str | None:
    if not path.exists():
        return None
    try:
        itself = open_torch(path)
    except FormatError as error:
        logger.info("'%s' cannot be read itself: %s", path, error)
        return None
    return difference(itself, opened)


def _noted_origin(other: Path) -> str | None:
    try:
        return read_header(other).metadata.get(ORIGIN)
    except FormatError:
        return None  # said by who opens it
