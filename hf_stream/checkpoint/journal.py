"""The journal of a work directory: what an earlier run has finished there, and what it was about to replace.

It is JSON, and it may come from anywhere: whatever is not just what is written here is refused.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hf_stream.checkpoint.folder import FileState, is_inside
from hf_stream.checkpoint.work import refusal, remove_tree
from hf_stream.errors import CheckpointError
from hf_stream.formats import is_weight_file
from hf_stream.storage.durability import flush

JOURNAL: Final = "journal.json"
JOURNAL_FILES: Final = frozenset({JOURNAL, JOURNAL + ".new"})
_VERSION: Final = 1
# Some hundred bytes for each file of a checkpoint.
_MAX_NBYTES: Final = 16 << 20
# Of a list, which each file is: an empty one takes many times its text in memory.
_MIN_LIST_NBYTES: Final = 8
_FEW: Final = 10
_MAX_NUMBER: Final = 2**63 - 1

States = Mapping[str, FileState]


@dataclass(frozen=True)
class Replacement:
    """How the files of a directory are replaced: the old ones go, in their order, then the new ones come in theirs.

    Attributes:
        old: Files that go or are replaced, as they were found.
        new: Files that come, as they were written.
        hidden: Weights that stay, and are out of sight meanwhile, so that nobody takes them for these.
    """

    old: States
    new: States
    hidden: States = field(default_factory=dict)


@dataclass(frozen=True)
class Journal:
    """What a run has noted.

    Attributes:
        fingerprint: What its files will hold; None if nobody may go on with it.
        boot: In which run of the machine its files were written, if they need not be on the disk yet; else None.
        replacement: Set once everything is written and old files may be gone.
    """

    fingerprint: str | None = None
    boot: str | None = None
    replacement: Replacement | None = None


def read_journal(work: Path, dir_fd: int) -> Journal | None:
    """The journal of a work directory, or None if there is none.

    Args:
        work: What errors call the directory.
        dir_fd: The open directory.

    Raises:
        CheckpointError: There is something else than a journal that we write.
    """
    path = work / JOURNAL
    try:
        fd = os.open(JOURNAL, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        fact = "is a link" if path.is_symlink() else f"cannot be opened ({error.strerror})"
        raise refusal(path, fact) from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise refusal(path, "is not a regular file")
        if status.st_size > _MAX_NBYTES:
            raise refusal(path, f"has {status.st_size} bytes, which no journal has")
        data = file.read()
    if not data.strip(b"\0"):
        return None  # what is left of one that was not flushed when power was lost
    if (data.count(b"[") + data.count(b"{") - _FEW) * _MIN_LIST_NBYTES > len(data):
        raise refusal(path, "holds more lists than a journal does")
    try:
        return _decoded(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise refusal(path, "is not a valid journal (damaged, hostile, or of another version)") from None


def write_journal(journal: Journal, work: Path, dir_fd: int, *, durable: bool) -> None:
    """Put a journal in the place of the one that is there.

    Raises:
        OSError: It cannot be written. The one that was there is there still.
        CheckpointError: It would be one that is not read again, for its size.
    """
    new = JOURNAL + ".new"
    content = json.dumps(_encoded(journal)).encode()
    if len(content) > _MAX_NBYTES:
        raise CheckpointError(f"'{work.parent}': there are too many files to replace them; save to a new directory")
    try:
        # A file of its own: whatever is there may be a second name of another one.
        remove_tree(new, dir_fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o666, dir_fd=dir_fd), "wb") as file:
            file.write(content)
        if durable:
            flush(new, dir_fd)
        os.rename(new, JOURNAL, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        if durable:
            flush(work)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(work / JOURNAL)) from error


def _encoded(journal: Journal) -> dict[str, Any]:
    encoded: dict[str, Any] = {"version": _VERSION, "fingerprint": journal.fingerprint, "boot": journal.boot}
    if journal.replacement is not None:
        encoded["replacement"] = {
            part: [[name, *state] for name, state in states.items()]
            for part, states in vars(journal.replacement).items()
        }
    return encoded


def _decoded(value: Any) -> Journal:
    if type(value) is not dict or value["version"] != _VERSION or not value.keys() <= _KEYS:
        raise ValueError
    fingerprint, boot = value["fingerprint"], value["boot"]
    if any(text is not None and type(text) is not str for text in (fingerprint, boot)):
        raise TypeError
    replacement = value.get("replacement")
    if replacement is None:
        return Journal(fingerprint, boot)
    if type(replacement) is not dict or replacement.keys() != _PARTS:
        raise ValueError
    replaces = Replacement(**{part: _states(replacement[part]) for part in _PARTS})
    if not all(is_weight_file(name) or name in replaces.new for name in (*replaces.old, *replaces.hidden)):
        raise ValueError  # nothing else is ever removed or hidden
    return Journal(fingerprint, boot, replaces)


def _states(value: Any) -> States:
    states = {}
    for name, *numbers in value:
        if not is_inside(name) or len(numbers) != 2:
            raise ValueError
        if any(type(number) is not int or abs(number) > _MAX_NUMBER for number in numbers):
            raise ValueError
        states[name] = FileState(*numbers)
    return states


_KEYS: Final = frozenset({"version", "fingerprint", "boot", "replacement"})
_PARTS: Final = frozenset({"old", "new", "hidden"})
