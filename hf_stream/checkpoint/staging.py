"""Where a checkpoint's files grow before they are one: all of them appear, or none does.

A work directory holds `growing/` (files that are being written), `files/` (whole ones, which will be the checkpoint)
and a journal. A destination that does not exist yet has it beside itself (`.NAME.hf-stream`), and `files/` is renamed
to the destination at the end. One that exists has it inside (`.hf-stream`), since only there a rename is sure to work.
At the end the old files go first, and the new ones come in such an order that at no moment old and new ones load as a
mixture. The journal tells the next run what was finished, and how to complete a replacement that was cut short.

This holds for processes that are killed, and for machines that lose power: each file is flushed to the disk before it
counts as finished, then the journal and the directories, and only then anything old is removed.
"""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from hf_stream.checkpoint.folder import Folder
from hf_stream.checkpoint.journal import JOURNAL, JOURNAL_FILES, Journal, Replacement, read_journal, write_journal
from hf_stream.checkpoint.paths import given_path
from hf_stream.checkpoint.replacement import Stage, is_one_step, keep_changed, plan_replacement, replace, show, stage_of
from hf_stream.checkpoint.work import WorkDirectory, remove_empty_folders, remove_tree, work_beside, work_path
from hf_stream.errors import CheckpointError, CopyError, FileKindError, HfStreamError, WriteError, because_of
from hf_stream.storage.durability import Writeback, boot_id, flush, flush_tree, is_durable
from hf_stream.storage.file import FileStorage, copy_file

logger = logging.getLogger(__name__)

GROWING = "growing"
FILES = "files"


class Staging:
    """The files of a checkpoint in the making.

    Args:
        directory: Where the checkpoint is to be.
        fingerprint: What the files will hold, as one string: a run that was cut short is taken up again if and only
            if its fingerprint was the same. None never takes up.
        file: If only one file is to be written: its name in `directory`, where nothing else is touched then.
        durable: Whether the checkpoint outlives a loss of power; see `is_durable`.

    Attributes:
        path: The directory of the whole files, until `commit`.
        finished: Names of the files that are whole, those of an earlier run included.
        completed: Whether all that was left to do was a replacement with these very files, which is now done.
        replaced: Bytes of the files that were there before and are gone or replaced, by name; after `commit`.

    Raises:
        CheckpointError: The destination cannot be used, holds what no run of ours has left, or another process is
            saving to it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        fingerprint: str | None = None,
        *,
        file: str | None = None,
        durable: bool | None = None,
    ) -> None:
        self.directory = Path(os.path.realpath(given_path(directory)))
        self.completed = False
        self.finished: set[str] = set()
        self.replaced: dict[str, int] = {}
        self._durable = is_durable(durable)
        self._fingerprint = fingerprint
        self._replacing = False
        self._flusher: ThreadPoolExecutor | None = None
        self._flushes: dict[str, Future[None]] = {}
        self._flushed: set[str] = set()
        self._writeback = Writeback()
        weakref.finalize(self, self._writeback.stop)
        try:
            self._work = self._claim(file)
        except BlockingIOError:
            raise CheckpointError(
                f"'{directory}': another process is saving to it; wait for it, or save elsewhere"
            ) from None
        except HfStreamError:
            raise
        except OSError as error:
            raise _unusable(directory, error) from error
        self._replaces = self._work.path.parent == self.directory
        self._leftovers = True
        self._growing = self._work.path / GROWING
        self.path = self._work.path / FILES
        try:
            self._take_up()
        except BaseException as error:
            self._work.close(remove=not self._leftovers)
            if isinstance(error, OSError) and not isinstance(error, HfStreamError):
                raise _unusable(directory, error) from error
            raise

    def keep(self, names: Collection[str]) -> None:
        """Drop what an earlier run left under other names than these."""
        try:
            for name in self.finished - set(names):
                remove_tree(self.path / name)
        except OSError as error:
            raise _unusable(self.directory, error) from error
        remove_empty_folders(self.path)
        self.finished &= set(names)

    def create(self, name: str, nbytes: int) -> FileStorage:
        """A file of `nbytes` with its space reserved, to be written and then declared with `finish`.

        Its name may have folders before it.

        Raises:
            CheckpointError: There is no room for it.
        """
        place = self._growing / name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            storage = FileStorage.create(place, nbytes)
        except OSError as error:
            fact = f"cannot reserve {nbytes} bytes: {error.strerror}; make room, or save elsewhere"
            raise because_of(error, f"'{self.directory / name}': {fact}", WriteError) from error
        storage.name = os.fspath(self.directory / name)  # where errors look for it, and users
        if self._durable:
            self._writeback.add(place)
        return storage

    def finish(self, name: str) -> None:
        """Declare a file whole: a later run need not write it again. It goes to the disk meanwhile."""
        self._check_process()
        self.finished.add(name)
        if self._durable:
            if self._flusher is None:
                self._flusher = ThreadPoolExecutor(1, "hf_stream flush")
            with suppress(RuntimeError):  # no thread can be started: there are too many, or the interpreter ends
                self._flushes[name] = self._flusher.submit(self._publish, name)
                return
        self._check(name, self._publish, name)

    def wait(self) -> None:
        """Wait until all finished files are on the disk.

        Raises:
            CopyError: One of them cannot be written.
        """
        for name, future in list(self._flushes.items()):
            self._check(name, future.result)
            del self._flushes[name]
            self._flushed.add(name)

    def write(self, name: str, content: bytes) -> None:
        """Add a small file; its name may have folders before it."""
        try:
            self._fresh_place(name).write_bytes(content)
        except OSError as error:
            raise _unusable(self.directory / name, error) from error

    def copy(self, name: str, source: Path) -> None:
        """Add a small file that is elsewhere already."""
        try:
            copy_file(source, self._fresh_place(name))
        except HfStreamError:
            raise
        except OSError as error:
            raise _unusable(self.directory / name, error) from error

    def commit(self, *, entry: str, stale: re.Pattern[str] | None = None) -> None:
        """Make the files the checkpoint.

        Args:
            entry: The file that names the others, or the only one.
            stale: Matches the names of old weight files, which go; also in the folders that new ones are in.

        Raises:
            CheckpointError: Something in the destination is in the way. Nothing there has been changed then.
            CopyError: A file cannot be written to the disk. Nothing there has been changed then, unless it says that
                the checkpoint is in place.
        """
        self._check_process()
        self.wait()
        if self._replaces:
            self._commit_into(entry, stale)
        else:
            self._commit_as()
        self._replacing = False
        self._close(remove=True)

    def _commit_as(self) -> None:
        """The files become the directory."""
        self._flush_files()
        try:
            os.rename(self.path, self.directory)
        except OSError as error:
            raise CheckpointError(
                f"'{self.directory}': something else was put there meanwhile: {error.strerror}; save elsewhere"
            ) from error
        if self._durable:
            self._flush_published(lambda: flush(self.directory.parent))

    def _commit_into(self, entry: str, stale: re.Pattern[str] | None) -> None:
        """The files take the place of those in the directory."""
        try:
            with Folder(self.directory) as folder, Folder(self.path) as staged:
                steps = plan_replacement(folder, staged, entry=entry, stale=stale)
                self._flush_files()
                if not is_one_step(steps):
                    self._write_journal(replacement=steps)
                    self._replacing = True
                replace(steps, folder, staged)
                self._note_replaced(steps)
                if self._durable:
                    self._flush_published(lambda: folder.flush((*steps.old, *steps.new, *steps.hidden)))
        except HfStreamError:
            raise
        except OSError as error:
            if not self._replacing:
                raise _unusable(self.directory, error) from error
            raise CheckpointError(
                f"'{self.directory}': replacing the checkpoint was cut short: {error}; remedy that, then "
                f"run: hf-stream clean '{self.directory}', call hf_stream.checkpoint.settle, or save to it again"
            ) from error

    def _note_replaced(self, replacement: Replacement) -> None:
        self.replaced = {name: state.nbytes for name, state in replacement.old.items()}

    def _flush_published(self, flush_names: Callable[[], None]) -> None:
        try:
            flush_names()
        except OSError as error:
            raise _with_errno(
                f"'{self.directory}': the new checkpoint is in place, but may not outlive a loss of power: "
                f"{error.strerror or error}; copy it elsewhere",
                error,
            ) from error

    def _check_process(self) -> None:
        if not self._work.is_ours:
            raise CheckpointError(f"'{self.directory}': only the process that began to save there can finish it")

    def _flush_files(self) -> None:
        if self._durable:
            self._check("", flush_tree, self.path, self._flushed)
            self._check("", flush, self._work.path)
            self._check("", self._work.flush_parents)

    def _check(self, name: str, call: Callable[..., object], *args: object) -> None:
        """Call something that writes a file to the disk, or gives it its name."""
        try:
            call(*args)
        except OSError as error:
            raise _with_errno(
                f"'{self.directory / name}': cannot be written to the disk: {error.strerror or error}; "
                "remedy that, or save elsewhere",
                error,
            ) from error

    def abandon(self, *, keep: bool = False) -> None:
        """Stop without a checkpoint; after `commit` or another `abandon`, and in a forked child, do nothing.

        Args:
            keep: Whether finished files stay for a later run to take up; without it nothing is left behind.
        """
        if self._work.closed or not self._work.is_ours:
            return
        for name, future in self._flushes.items():
            if not keep:
                future.cancel()
            elif future.exception() is not None:
                self.finished.discard(name)
        # Once old weights may be gone the new ones must stay, for the next run to put them in place.
        if (keep and self.finished) or self._replacing:
            self._close(remove=False)
        else:
            self._close(remove=True)

    def _close(self, *, remove: bool) -> None:
        try:
            self._writeback.close()
            if self._flusher is not None:
                self._flusher.shutdown(wait=True, cancel_futures=True)
            self._flushes.clear()
            if not remove:
                with suppress(OSError):  # the next run removes it
                    remove_tree(self._growing)
        finally:
            self._work.close(remove=remove)

    def _claim(self, file: str | None) -> WorkDirectory:
        if self.directory.exists() and not self.directory.is_dir():
            raise FileKindError(f"'{self.directory}' is a file; pass a directory to save into")
        while True:
            path = work_path(self.directory, file)
            work = WorkDirectory(path)
            if path == work_path(self.directory, file):
                break
            work.close(remove=True)  # the destination was made by somebody else just before the lock was there
        beside = work_beside(self.directory)
        if path.parent == self.directory and not file and os.path.lexists(beside):
            # Left by a run that began before the directory was there, if that does not go on still.
            with suppress(OSError, CheckpointError):
                _remove_leftovers(beside)
        return work

    def _take_up(self) -> None:
        self._work.check_contents(JOURNAL_FILES, frozenset({GROWING, FILES}))
        found = read_journal(self._work.path, self._work.fd)
        self._leftovers = found is not None or (self.path.exists() and any(self.path.iterdir()))
        journal = found or Journal()
        same = self._fingerprint is not None and journal.fingerprint == self._fingerprint
        if journal.replacement is not None:
            self.completed = self._complete(journal.replacement) and same
            same = False
        if journal.boot not in (None, boot_id()):
            same = False  # the files may have lost what was not on the disk when the machine went down
        if not same:
            self._discard(journal)
        remove_tree(self._growing)
        self._growing.mkdir()
        self.path.mkdir(exist_ok=True)
        with Folder(self.path) as staged:
            self.finished = set(staged.all_names())
        if self._fingerprint is not None:
            if self._durable and journal.boot is not None:
                flush_tree(self.path)
            self._write_journal()
        else:
            remove_tree(JOURNAL, self._work.fd)

    def _discard(self, journal: Journal) -> None:
        """Remove what an earlier run has finished, which this one cannot go on with."""
        count = len(os.listdir(self.path)) if journal.replacement is None and self.path.exists() else 0
        if count:
            logger.warning("'%s': %d finished files of another, interrupted run are discarded", self.directory, count)
        remove_tree(self.path)

    def _complete(self, replacement: Replacement) -> bool:
        """Go on with a replacement that was cut short; False if it has been superseded."""
        self.path.mkdir(exist_ok=True)
        with Folder(self.directory) as folder, Folder(self.path) as staged:
            stage = stage_of(replacement, folder, staged)
            if stage is Stage.UNDER_WAY:
                self._replacing = True
                replace(keep_changed(replacement, folder), folder, staged)
                self._note_replaced(replacement)
                if self._durable:
                    folder.flush((*replacement.old, *replacement.new, *replacement.hidden))
                self._replacing = False
            elif stage is Stage.SUPERSEDED:
                logger.warning(
                    "'%s': an earlier save was cut short while it replaced the checkpoint, and is given up, as the "
                    "weights there changed since",
                    self.directory,
                )
                show(replacement, folder, staged)
            elif stage is Stage.UNKNOWN:
                raise CheckpointError(
                    f"'{self.directory}': replacing the checkpoint was cut short, and cannot be completed, as the new "
                    f"files changed since. They are in '{self.path}': move them into place by hand, or give them up: "
                    f"hf-stream clean --force '{self.directory}'"
                )
        return stage is not Stage.SUPERSEDED

    def _write_journal(self, replacement: Replacement | None = None) -> None:
        journal = Journal(self._fingerprint, None if self._durable else boot_id(), replacement)
        write_journal(journal, self._work.path, self._work.fd, durable=self._durable)

    def _publish(self, name: str) -> None:
        growing = self._growing / name
        if self._durable:
            flush(growing)
            self._writeback.remove(growing)
        os.rename(growing, self._place(name))

    def _fresh_place(self, name: str) -> Path:
        place = self._place(name)
        place.unlink(missing_ok=True)
        return place

    def _place(self, name: str) -> Path:
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place


def _remove_leftovers(path: Path) -> None:
    """Remove a work directory that nobody works in, if there is nothing in it but what we leave."""
    work = WorkDirectory(path)
    try:
        work.check_contents(JOURNAL_FILES, frozenset({GROWING, FILES}))
    except BaseException:
        work.close(remove=False)
        raise
    work.close(remove=True)


def _unusable(where: str | os.PathLike[str], error: OSError) -> CheckpointError:
    fact = f"cannot be written: {error.strerror}; save elsewhere, or remedy that"
    return because_of(error, f"'{os.fspath(where)}': {fact}", WriteError)


def _with_errno(message: str, error: OSError) -> CopyError:
    explained = CopyError(message)
    explained.errno = error.errno
    return explained
