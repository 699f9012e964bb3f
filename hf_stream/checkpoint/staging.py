"""Where a checkpoint's files grow before they are one: all of them appear, or none does.

A work directory holds `growing/` (files that are being written), `files/` (whole ones, which will be the checkpoint)
and `journal.json`. A destination that does not exist yet has it beside itself (`.NAME.hf-stream`), and `files/` is
renamed to the destination at the end. One that exists has it inside (`.hf-stream`), since only there a rename is sure
to work. At the end the old weights are removed first, and the file that makes the directory loadable is put in place
last, so that at no moment old and new files load as a mixture. The journal tells the next run what was finished, and
to complete a replacement that was cut short.

All this holds for processes that are killed at any moment. Files are not forced to the disk: a machine that loses power
within seconds of a save may lose the data, as with any other file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_stream.checkpoint.work import WorkDirectory, remove_tree
from hf_stream.errors import CheckpointError
from hf_stream.storage.file import FileStorage

WORK_SUFFIX = ".hf-stream"
_JOURNAL = "journal.json"


class Staging:
    """The files of a checkpoint in the making.

    Args:
        directory: Where the checkpoint is to be.
        fingerprint: What the files will hold, as one string: a run that was cut short is taken up again if and only
            if its fingerprint was the same. None never takes up.
        file: If only one file is to be written: its name in `directory`, where nothing else is touched then.

    Attributes:
        path: The directory of the whole files, until `commit`.
        finished: Names of the files that are whole, those of an earlier run included.
        completed: Whether all that was left to do was a replacement with these very files, which is now done.

    Raises:
        CheckpointError: The destination cannot be used, or another process is saving to it.
    """

    def __init__(
        self, directory: str | os.PathLike[str], fingerprint: str | None = None, *, file: str | None = None
    ) -> None:
        self.directory = Path(os.path.realpath(directory))
        self.completed = False
        try:
            self._work = self._claim(file)
        except BlockingIOError:
            raise CheckpointError(
                f"'{directory}': another process is saving to it; wait for it, or save elsewhere"
            ) from None
        except OSError as error:
            raise _unusable(directory, error) from error
        self._replaces = self._work.path.parent == self.directory
        self._growing = self._work.path / "growing"
        self.path = self._work.path / "files"
        try:
            self._take_up(fingerprint)
        except OSError as error:
            self._work.close(remove=False)
            raise _unusable(directory, error) from error
        self._fingerprint = fingerprint
        self.finished = set(os.listdir(self.path))

    def keep(self, names: Collection[str]) -> None:
        """Drop what an earlier run left under other names than these."""
        for name in self.finished - set(names):
            remove_tree(self.path / name)
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
            return FileStorage.create(place, nbytes)
        except OSError as error:
            raise CheckpointError(
                f"'{self.directory / name}': cannot reserve {nbytes} bytes: {error.strerror}; "
                "make room, or save elsewhere"
            ) from error

    def finish(self, name: str) -> None:
        """Declare a file whole: a later run need not write it again."""
        os.rename(self._growing / name, self._place(name))
        self.finished.add(name)

    def write(self, name: str, content: bytes) -> None:
        """Add a small file; its name may have folders before it."""
        try:
            self._place(name).write_bytes(content)
        except OSError as error:
            raise _unusable(self.directory / name, error) from error

    def copy(self, name: str, source: Path) -> None:
        """Add a small file that is elsewhere already."""
        try:
            shutil.copyfile(source, self._place(name))
        except OSError as error:
            raise _unusable(self.directory / name, error) from error

    def commit(self, *, entry: str, stale: re.Pattern[str] | None = None) -> None:
        """Make the files the checkpoint.

        Args:
            entry: The file that makes the directory loadable.
            stale: Matches the names of old weight files, which go; in folders, only those that are replaced.

        Raises:
            CheckpointError: Something in the destination is in the way. Nothing there has been changed then.
        """
        if self._replaces:
            try:
                steps = self._steps(entry, stale)
                self._write_journal({"fingerprint": self._fingerprint, "replacing": steps})
            except OSError as error:
                raise _unusable(self.directory, error) from error
            try:
                self._replace(steps)
            except OSError as error:
                raise CheckpointError(
                    f"'{self.directory}': replacing the checkpoint was cut short: {error}; remedy that, then "
                    f"call hf_stream.checkpoint.settle('{self.directory}'), or save to it again"
                ) from error
        else:
            try:
                os.rename(self.path, self.directory)
            except OSError as error:
                raise CheckpointError(
                    f"'{self.directory}': something else was put there meanwhile: {error.strerror}; save elsewhere"
                ) from error
        self._work.close(remove=True)

    def abandon(self, *, keep: bool = False) -> None:
        """Stop without a checkpoint; after `commit` or another `abandon`, do nothing.

        Args:
            keep: Whether finished files stay for a later run to take up; without it nothing is left behind.
        """
        if self._work.closed:
            return
        # Once old weights may be gone the new ones must stay, for the next run to put them in place.
        if (keep and self.finished) or "replacing" in _read_journal(self._work.path):
            remove_tree(self._growing)
            self._work.close(remove=False)
        else:
            self._work.close(remove=True)

    def _claim(self, file: str | None) -> WorkDirectory:
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"'{self.directory}' is a file; pass a directory to save into")
        while True:
            path = self.directory / f".{file}{WORK_SUFFIX}" if file else _work_path(self.directory)
            work = WorkDirectory(path)
            if file or path == _work_path(self.directory):
                break
            work.close(remove=True)  # the destination was made by somebody else just before the lock was there
        beside = _beside(self.directory)
        if path.parent == self.directory and not file and beside.is_dir():
            # Left by a run that began before the directory was there, if that does not go on still.
            with suppress(OSError):
                WorkDirectory(beside).close(remove=True)
        return work

    def _take_up(self, fingerprint: str | None) -> None:
        journal = _read_journal(self._work.path)
        same = fingerprint is not None and journal.get("fingerprint") == fingerprint
        if "replacing" in journal:
            self._replace(journal["replacing"])
            self.completed = same
            same = False
        if not same:
            remove_tree(self.path)
        remove_tree(self._growing)
        self._growing.mkdir()
        self.path.mkdir(exist_ok=True)
        self._write_journal({"fingerprint": fingerprint})

    def _steps(self, entry: str, stale: re.Pattern[str] | None) -> dict[str, list[str]]:
        """What `_replace` is to do, after everything that could get in its way has been seen to."""
        new = sorted(_files(self.path), key=lambda name: (name == entry, name))
        there = {*os.listdir(self.directory), *(name for name in new if (self.directory / name).is_file())}
        old = [name for name in sorted(there) if stale and stale.fullmatch(name)]
        for name in (*old, *new):
            target = self.directory / name
            if target.is_dir() and not target.is_symlink():
                raise CheckpointError(f"'{target}' is a directory where a file is to be; move it away")
        for name in new:
            target = self.directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_file():
                os.chmod(self.path / name, stat.S_IMODE(target.stat().st_mode))
        # An index first: without it, what is left of its shards is not taken for a checkpoint.
        return {"remove": sorted(old, key=lambda name: not name.endswith(".json")), "move": new}

    def _replace(self, steps: dict[str, list[str]]) -> None:
        # Removing everything old first: with shards of both kinds a directory could load as a mixture. Repeatable: once
        # a file has been moved it is not staged any more, all old ones are gone, and new ones may have their names.
        staged = set(_files(self.path))
        if staged.issuperset(steps["move"]):
            for name in steps["remove"]:
                (self.directory / name).unlink(missing_ok=True)
        for name in steps["move"]:
            if name in staged:
                os.replace(self.path / name, self.directory / name)

    def _place(self, name: str) -> Path:
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _write_journal(self, journal: dict[str, Any]) -> None:
        new = self._work.path / (_JOURNAL + ".new")
        new.write_text(json.dumps(journal))
        os.replace(new, self._work.path / _JOURNAL)


def check_settled(directory: Path) -> None:
    """Refuse a directory in which a replacement was cut short: old and new files may lie side by side.

    Raises:
        CheckpointError: It is such a directory.
    """
    if "replacing" in _read_journal(directory / WORK_SUFFIX):
        raise CheckpointError(
            f"'{directory}': replacing the checkpoint was cut short, or is under way; wait for it, or complete it: "
            f"call hf_stream.checkpoint.settle('{directory}'), or save to it again"
        )


def settle(directory: str | os.PathLike[str]) -> None:
    """Complete the replacement of a checkpoint that was cut short; do nothing where there is none.

    Raises:
        CheckpointError: Another process is saving to the directory.
    """
    if "replacing" in _read_journal(Path(directory) / WORK_SUFFIX):
        Staging(directory).abandon()


def _work_path(directory: Path) -> Path:
    return directory / WORK_SUFFIX if directory.is_dir() else _beside(directory)


def _beside(directory: Path) -> Path:
    return directory.parent / f".{directory.name}{WORK_SUFFIX}"


def _read_journal(work: Path) -> dict[str, Any]:
    try:
        journal = json.loads((work / _JOURNAL).read_bytes())
    except (OSError, ValueError):
        return {}
    return journal if isinstance(journal, dict) else {}


def _files(directory: Path) -> Iterator[str]:
    """The files under a directory, by their names relative to it."""
    for folder, _, names in os.walk(directory):
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), directory)


def _unusable(where: str | os.PathLike[str], error: OSError) -> CheckpointError:
    return CheckpointError(f"'{os.fspath(where)}': cannot be written: {error.strerror}; save elsewhere, or remedy that")
