"""Where a checkpoint's directory grows, and how it comes and goes in one step.

`checkpoint-N` grows in `_checkpoint-N.hf-stream` beside it, a name that Trainer neither takes for a checkpoint nor
uploads with the rest of its directory. That is also where a checkpoint is moved to be removed, or to make room for
another one of the same step. What a killed process leaves there is removed by the next one; a replacement that was cut
short between its two steps is completed. A checkpoint is on the disk before it gets its name, and its name before any
other one goes.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from hf_stream.checkpoint.work import WORK_SUFFIX, WorkDirectory, remove_tree
from hf_stream.errors import CheckpointError
from hf_stream.storage.durability import flush, flush_tree, is_durable

logger = logging.getLogger(__name__)

_REPLACED = "replaced"
_REMOVED = "removed"


class _InUseError(CheckpointError):
    """Another process is at work there."""


def growing_path(target: Path) -> Path:
    """Where a checkpoint's directory is until it is complete; its name is the final one."""
    return target.parent / f"_{target.name}{WORK_SUFFIX}" / target.name


@contextmanager
def growing(target: Path, durable: bool | None = None) -> Iterator[Path]:
    """Give an empty directory to fill, which becomes `target` at the end of the block, or goes if that fails.

    Args:
        target: The checkpoint.
        durable: Whether it outlives a loss of power; see `is_durable`.

    Raises:
        CheckpointError: Another process is saving to it.
    """
    path = growing_path(target)
    work = _claim(target)
    settled = False
    try:
        path.mkdir()
        yield path
        if is_durable(durable):
            flush_tree(path)
            flush(work.path)
            work.flush_parents()
        if os.path.lexists(target):
            _move_away(target, work.path / _REPLACED)
        os.rename(path, target)
        if is_durable(durable):
            work.flush_parents()
    finally:
        try:
            _complete(target)  # an interrupt may have come between the two
            settled = True
        finally:
            work.close(remove=settled)


def remove(target: Path) -> None:
    """Remove a checkpoint: its directory is gone at once, or not at all, where the file system can do that."""
    work = _claim(target)
    try:
        _move_away(target, work.path / _REMOVED)
    finally:
        work.close(remove=True)


def remove_oldest(run_directory: str, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints until `limit` are left; the newest and the best one always stay.

    Args:
        run_directory: Directory of the checkpoints.
        limit: None or 0 for all.
        best: The best checkpoint, if there is one.
    """
    if not limit or limit < 0:
        return
    oldest_first = sort_checkpoints(run_directory, use_mtime=True)
    staying = {*oldest_first[-1:], *([str(Path(best))] if best is not None else [])}
    surplus = len(oldest_first) - max(limit, len(staying))
    for checkpoint in [path for path in oldest_first if path not in staying][: max(surplus, 0)]:
        remove(Path(checkpoint))


def clear_leftovers(run_directory: str) -> None:
    """Remove what processes that were killed have left, and leave alone what others are working on."""
    for path in Path(run_directory).glob(f"_{PREFIX_CHECKPOINT_DIR}-*{WORK_SUFFIX}"):
        try:
            _claim(path.with_name(path.name[1 : -len(WORK_SUFFIX)])).close(remove=True)
        except _InUseError:
            pass
        except (CheckpointError, OSError) as error:
            logger.warning("%s", error)


def _claim(target: Path) -> WorkDirectory:
    path = growing_path(target)
    try:
        work = WorkDirectory(path.parent)
    except BlockingIOError:
        raise _InUseError(
            f"'{target}': another process is saving to it; wait for it, or save to another output_dir"
        ) from None
    try:
        # Links would lead what follows elsewhere. Checkpoints themselves may have some.
        work.check_contents(frozenset(), frozenset({path.name, _REPLACED, _REMOVED}), inside=False)
        _complete(target)
    except BaseException:
        work.close(remove=False)
        raise
    for leftover in (path, work.path / _REPLACED, work.path / _REMOVED):
        remove_tree(leftover)
    return work


def _move_away(target: Path, place: Path) -> None:
    """Move a checkpoint, or remove it file by file where it cannot be moved: then an empty directory is in its place.

    An overlay file system, as of containers, does not move directories that come from a lower layer.
    """
    try:
        os.rename(target, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        place.mkdir()
        remove_tree(target)


def _complete(target: Path) -> None:
    """Take the second step of a replacement that was cut short after the first: the new checkpoint was complete."""
    path = growing_path(target)
    replaced = path.parent / _REPLACED
    if not replaced.exists():
        return
    if path.exists():
        remove_tree(target)  # what is left of one that could not be moved
        os.rename(path, target)
    elif not os.path.lexists(target):
        # The new one is lost, and the old one is all there is.
        os.rename(replaced, target)
