"""Where a checkpoint's directory grows, and how it comes and goes in one step.

`checkpoint-N` grows in `_checkpoint-N.hf-stream` beside it, a name that Trainer neither takes for a checkpoint nor
uploads with the rest of its directory. That is also where a checkpoint is moved to be removed, or to make room for
another one of the same step. What a killed process leaves there is removed by the next one; a replacement that was cut
short between its two steps is completed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from hf_stream.checkpoint.staging import WORK_SUFFIX
from hf_stream.checkpoint.work import WorkDirectory, remove_tree
from hf_stream.errors import CheckpointError

_REPLACED = "replaced"
_REMOVED = "removed"


def growing_path(target: Path) -> Path:
    """Where a checkpoint's directory is until it is complete; its name is the final one."""
    return target.parent / f"_{target.name}{WORK_SUFFIX}" / target.name


@contextmanager
def growing(target: Path) -> Iterator[Path]:
    """Give an empty directory to fill, which becomes `target` at the end of the block, or goes if that fails.

    Raises:
        CheckpointError: Another process is saving to it.
    """
    path = growing_path(target)
    work = _claim(target)
    settled = False
    try:
        path.mkdir()
        yield path
        if target.exists():
            os.rename(target, work.path / _REPLACED)
        os.rename(path, target)
    finally:
        try:
            _complete(target)  # an interrupt may have come between the two
            settled = True
        finally:
            work.close(remove=settled)


def remove(target: Path) -> None:
    """Remove a checkpoint: its directory is gone at once, or not at all."""
    work = _claim(target)
    try:
        os.rename(target, work.path / _REMOVED)
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
        with suppress(CheckpointError):
            _claim(path.with_name(path.name[1 : -len(WORK_SUFFIX)])).close(remove=True)


def _claim(target: Path) -> WorkDirectory:
    path = growing_path(target)
    try:
        work = WorkDirectory(path.parent)
    except BlockingIOError:
        raise CheckpointError(
            f"'{target}': another process is saving to it; wait for it, or save to another output_dir"
        ) from None
    _complete(target)
    for leftover in (path, work.path / _REPLACED, work.path / _REMOVED):
        remove_tree(leftover)
    return work


def _complete(target: Path) -> None:
    """Take the second step of a replacement that was cut short after the first: the new checkpoint was complete."""
    path = growing_path(target)
    if (path.parent / _REPLACED).exists() and not target.exists():
        os.rename(path, target)
