"""What runs that were cut short have left in a directory: refused by readers, completed, or cleared away."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from hf_stream.checkpoint.folder import Folder
from hf_stream.checkpoint.journal import JOURNAL_FILES, read_journal
from hf_stream.checkpoint.paths import given_path
from hf_stream.checkpoint.replacement import Stage, show, stage_of
from hf_stream.checkpoint.staging import FILES, GROWING, Staging
from hf_stream.checkpoint.work import LOCK, WORK_SUFFIX, WorkDirectory, refusal, remove_tree, work_beside, work_path
from hf_stream.errors import CheckpointError, HfStreamError
from hf_stream.storage.durability import boot_id

_UNFINISHED = (Stage.UNDER_WAY, Stage.UNKNOWN)

logger = logging.getLogger(__name__)


def check_settled(directory: Path) -> None:
    """Refuse a directory in which a replacement was cut short: old and new files may be missing.

    A work directory that is not ours is not obeyed, and no obstacle.

    Raises:
        CheckpointError: It is such a directory.
    """
    try:
        pending = _pending(directory)
    except (CheckpointError, OSError) as error:
        logger.warning("%s", error)
        return
    if pending:
        raise CheckpointError(
            f"'{directory}': replacing the checkpoint was cut short, or is under way; wait for it, or complete it: "
            f"run: hf-stream clean '{directory}', call hf_stream.checkpoint.settle, or save to it again"
        )


def kept_files(directory: Path, fingerprint: str, file: str | None = None) -> Path | None:
    """The directory of whole files that an interrupted run has left, for one with the same fingerprint to take up.

    Args:
        directory: That of the destination.
        fingerprint: Of what is to be written, as for `Staging`.
        file: The name of the destination in there, if it is one file.

    Raises:
        CheckpointError: What is there was not left by us.
    """
    work = work_path(Path(os.path.realpath(directory)), file)
    try:
        with Folder(work, follow=False) as opened:
            journal = read_journal(work, opened.fd)
    except NotADirectoryError:
        raise refusal(work, "is a link or a file") from None
    except FileNotFoundError:
        return None
    if journal is None or journal.fingerprint != fingerprint or journal.boot not in (None, boot_id()):
        return None
    return work / FILES


def settle(directory: str | os.PathLike[str]) -> None:
    """Complete the replacement of a checkpoint that was cut short; do nothing where there is none.

    If somebody else has saved other weights there since, theirs stay.

    Raises:
        CheckpointError: Another process is saving to the directory, or what is there was not left by us.
    """
    if _pending(given_path(directory), or_done=True):
        Staging(directory).abandon()


def clean(directory: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
    """Remove what runs that were cut short, or others, have left in a checkpoint's work directories.

    A replacement that was cut short is completed first, as `settle` does it. Links are removed and not followed.

    Args:
        directory: That of the checkpoint, whether it is there already or not.
        force: Whether to give up a replacement that cannot be completed. The new weights may be the only ones left.

    Returns:
        The work directories, and others in their places, that are gone.

    Raises:
        CheckpointError: There is no such place, another process is saving there, a replacement cannot be completed, or
            something cannot be removed.
    """
    place = Path(os.path.realpath(given_path(directory)))
    if not (place if place.exists() else place.parent).is_dir():
        raise CheckpointError(f"'{directory}' is no directory and there is none to hold it; pass that of a checkpoint")
    try:
        return _clean(place, force)
    except HfStreamError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"'{directory}': {error.filename or 'what is left there'} cannot be removed: {error.strerror}; remedy that"
        ) from error


def _clean(place: Path, force: bool) -> list[Path]:
    pending = place / WORK_SUFFIX
    completed = [pending] if os.path.lexists(pending) else []
    if _is_directory(pending):
        _remove_strangers(pending)
        try:
            unfinished = _pending(place, or_done=True)
        except CheckpointError:
            unfinished = False  # its journal is none of ours
        if unfinished and not force:
            settle(place)
        elif unfinished:
            _show_hidden(place, pending)
    inside = [place / name for name in os.listdir(place)] if place.is_dir() else []
    work = [path for path in inside if path.name.startswith(".") and path.name.endswith(WORK_SUFFIX)]
    # A Trainer's callback sees to its own directories: a whole checkpoint may be in one of them.
    of_trainer = [path for path in inside if path.name.startswith("_") and path.name.endswith(WORK_SUFFIX)]
    strange = [entry for path in of_trainer for entry in _strange_entries(path)]
    found = [path for path in (work_beside(place), *work) if os.path.lexists(path)]
    for path in found:
        try:
            WorkDirectory(path).close(remove=True)
        except BlockingIOError:
            raise CheckpointError(f"'{place}': another process is saving to it; wait for it") from None
        except (CheckpointError, OSError):
            remove_tree(path)
    for path in strange:
        remove_tree(path)
    left = next(filter(os.path.lexists, found), None)
    if left is not None:
        raise CheckpointError(f"'{left}' is still there: it cannot be removed, or another process has begun to save")
    completed = [path for path in completed if path not in found and not os.path.lexists(path)]
    return [*completed, *found, *strange]


def _pending(directory: Path, *, or_done: bool = False) -> bool:
    """Whether a replacement there is to be completed.

    Args:
        directory: The checkpoint's.
        or_done: Whether one that is complete, or given up, but not cleared away counts as well.
    """
    work = directory / WORK_SUFFIX
    if not os.path.lexists(work):
        return False
    try:
        with Folder(work, follow=False) as opened, Folder(directory) as folder:
            journal = read_journal(work, opened.fd)
            if journal is None or journal.replacement is None:
                return False
            if or_done:
                return True
            try:
                staged = Folder(work / FILES, follow=False)
            except OSError:
                return stage_of(journal.replacement, folder, None) in _UNFINISHED
            with staged:
                return stage_of(journal.replacement, folder, staged) in _UNFINISHED
    except NotADirectoryError:
        raise refusal(work, "is a link or a file") from None
    except FileNotFoundError:
        return False  # whoever worked there has just finished


def _show_hidden(place: Path, pending: Path) -> None:
    """Put back the weights that a replacement which is given up has moved out of sight: they are no part of it."""
    with Folder(pending, follow=False) as opened, Folder(place) as folder:
        journal = read_journal(pending, opened.fd)
        with suppress(FileNotFoundError), Folder(pending / FILES, follow=False) as staged:
            if journal is not None and journal.replacement is not None:
                show(journal.replacement, folder, staged)


def _remove_strangers(pending: Path) -> None:
    """Remove what does not belong into a work directory: no reason to leave a replacement as it is."""
    lock = pending / LOCK
    if lock.is_symlink() or not lock.is_file():
        remove_tree(lock)  # nobody holds this one
    try:
        work = WorkDirectory(pending)
    except BlockingIOError:
        raise CheckpointError(f"'{pending.parent}': another process is saving to it; wait for it") from None
    try:
        for path in [*pending.iterdir()]:
            if path.name not in (FILES, GROWING, LOCK, *JOURNAL_FILES) or path.is_symlink():
                remove_tree(path)
    finally:
        work.close(remove=False)


def _strange_entries(work: Path) -> list[Path]:
    """What is neither a lock nor a directory in a work directory; itself if it is none."""
    if not _is_directory(work):
        return [work]
    return [
        path
        for path in work.iterdir()
        if not _is_directory(path) and (path.name != LOCK or not path.is_file() or path.is_symlink())
    ]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
