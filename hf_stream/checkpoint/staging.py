"""Where a checkpoint's files grow before they are one: all of them appear, or none does.

A work directory holds `files/` (what will be the checkpoint), `journal.json` and `lock`. A destination that does not
exist yet gets its work directory beside it (`.NAME.hf-stream`), and `files/` is renamed to it at the end. One that exists
gets it inside (`.hf-stream`), since only there a rename is sure to work; at the end the old weights are removed first
and the file that makes the directory loadable is put in place last, so that at no moment old and new files load as a
mixture. The journal tells the next run what was finished, and to complete a replacement that was cut short.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_stream.errors import CheckpointError
from hf_stream.storage.file import FileStorage

INSIDE = ".hf-stream"
_INCOMPLETE = ".incomplete"


class Staging:
    """The files of a checkpoint in the making.

    Args:
        directory: Where the checkpoint is to be.
        fingerprint: What the files will hold, as one string: a run that was cut short is taken up again if and only
            if its fingerprint was the same. None never takes up.

    Attributes:
        path: The directory of the files, until `commit`.
        finished: Names of the files that are whole, those of an earlier run included.

    Raises:
        CheckpointError: The destination is a file, or another process is saving to it.
    """

    def __init__(self, directory: str | os.PathLike[str], fingerprint: str | None = None) -> None:
        self.directory = Path(os.path.realpath(directory))
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"'{directory}' is a file; pass a directory to save into")
        self._replaces = self.directory.is_dir()
        self._work = work_directory(self.directory)
        self._work.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._work, self.directory)
        self.path = self._work / "files"
        journal = self._read_journal()
        if journal.get("replacing"):
            self._replace(journal["replacing"])
            journal = {}
        resumed = fingerprint is not None and journal.get("fingerprint") == fingerprint
        if not resumed:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(exist_ok=True)
        for leftover in self.path.glob("*" + _INCOMPLETE):
            leftover.unlink()
        self.finished = {name for name in os.listdir(self.path)}
        self._write_journal({"fingerprint": fingerprint})

    def create(self, name: str, nbytes: int) -> FileStorage:
        """A file of `nbytes` with its space reserved, to be written and then declared with `finish`.

        Raises:
            CheckpointError: There is no room for it.
        """
        try:
            return FileStorage.create(self.path / (name + _INCOMPLETE), nbytes)
        except OSError as error:
            raise CheckpointError(
                f"'{self.directory / name}': cannot reserve {nbytes} bytes: {error.strerror}"
            ) from error

    def finish(self, name: str) -> None:
        """Declare a file whole: a later run need not write it again."""
        os.rename(self.path / (name + _INCOMPLETE), self.path / name)
        self.finished.add(name)

    def write(self, name: str, content: bytes) -> None:
        """Add a small file."""
        (self.path / name).write_bytes(content)

    def commit(self, *, entry: str, stale: re.Pattern[str]) -> None:
        """Make the files the checkpoint.

        Args:
            entry: The file that makes the directory loadable.
            stale: Matches the names of old weight files, which go.
        """
        if not self._replaces:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.path, self.directory)
            self._close()
            return
        old = sorted(name for name in os.listdir(self.directory) if stale.fullmatch(name))
        new = sorted(os.listdir(self.path), key=lambda name: (name == entry, name))
        steps = {"remove": sorted(old, key=lambda name: not name.endswith(".json")), "move": new}
        for name in new:
            _take_over_mode(self.directory / name, self.path / name)
        self._write_journal({"replacing": steps})
        self._replace(steps)
        self._close()

    def abandon(self, *, keep: bool = False) -> None:
        """Stop without a checkpoint.

        Args:
            keep: Whether finished files stay for a later run to take up; without it nothing is left behind.
        """
        if not keep or not any(not name.endswith(_INCOMPLETE) for name in os.listdir(self.path)):
            self._close()
            return
        for leftover in self.path.glob("*" + _INCOMPLETE):
            leftover.unlink()
        os.close(self._lock)

    def _replace(self, steps: dict[str, Sequence[str]]) -> None:
        # Removing everything old first: with shards of both kinds a directory could load as a mixture. Repeatable: a
        # file that has been moved is not staged any more, and is then not to be removed.
        staged = set(os.listdir(self.path))
        if staged >= set(steps["move"]):
            for name in steps["remove"]:
                (self.directory / name).unlink(missing_ok=True)
        for name in steps["move"]:
            if name in staged:
                _move(self.path / name, self.directory / name)

    def _close(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        os.close(self._lock)

    def _read_journal(self) -> dict[str, Any]:
        try:
            journal = json.loads((self._work / "journal.json").read_text())
        except (OSError, ValueError):
            return {}
        return journal if isinstance(journal, dict) else {}

    def _write_journal(self, journal: dict[str, Any]) -> None:
        new = self._work / "journal.json.new"
        new.write_text(json.dumps(journal))
        os.replace(new, self._work / "journal.json")


def work_directory(directory: Path) -> Path:
    """Where a checkpoint that is to be at `directory` (a real path) is made."""
    return directory / INSIDE if directory.is_dir() else directory.parent / f".{directory.name}{INSIDE}"


def check_settled(directory: Path) -> None:
    """Refuse a directory in which a replacement was cut short: old and new files may lie side by side.

    Raises:
        CheckpointError: It is such a directory.
    """
    journal = directory / INSIDE / "journal.json"
    if journal.exists() and b'"replacing"' in journal.read_bytes():
        raise CheckpointError(
            f"'{directory}': replacing the checkpoint was cut short or is under way; save to it again to complete it"
        )


def _locked(work: Path, directory: Path) -> int:
    lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise CheckpointError(f"another process is saving to '{directory}'; wait for it, or save elsewhere") from None
    return lock


def _take_over_mode(old: Path, new: Path) -> None:
    if old.is_file():
        os.chmod(new, stat.S_IMODE(old.stat().st_mode))


def _move(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        os.replace(source, target)
