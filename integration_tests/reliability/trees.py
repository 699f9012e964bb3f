"""What is on the disk, by names and bytes, and whether it is an old state, a new one, or a mixture."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

# Name -> a digest of the bytes, what a link points to, or "directory".
Tree = dict[str, str]


def everything(top: Path) -> Tree:
    """All that is under a directory, or the file itself under the name ""; {} where there is nothing."""
    if top.is_file():
        return {"": _digest(top)}
    found = {}
    for path in _walk(top):
        name = str(path.relative_to(top))
        if name.split("/")[0] == "lost+found":
            continue
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "directory" if path.is_dir() else _digest(path)
    return found


def files(top: Path) -> Tree | None:
    """The files that a plain reader may see: none of our work directories; None where there is nothing at all."""
    if not os.path.lexists(top):
        return None
    return {
        name: content
        for name, content in everything(top).items()
        if content != "directory" and not any(part.endswith(".hf-stream") for part in name.split("/"))
    }


def mixture(left: Tree | None, old: Tree | None, new: Tree | None) -> str | None:
    """Say what is wrong about the files left by an interruption; None if they are part of one state alone.

    A place that was empty is empty or holds the whole new state. One that was in use may lack files, but those that are
    there are all old, or all new.
    """
    if left is None:
        return None if old is None or "" in old else "the directory is gone"
    if old is None:
        return None if left == new else f"neither absent nor whole: {difference(left, new)}"
    if left.items() <= old.items() or (new is not None and left.items() <= new.items()):
        return None
    return f"a mixture: {difference(left, old)} of the old, and {difference(left, new)} of the new"


def difference(left: Tree | None, wanted: Tree | None) -> str:
    """How one tree differs from another, in words."""
    left, wanted = left or {}, wanted or {}
    parts = [
        (kind, sorted(names))
        for kind, names in (
            ("lacks", wanted.keys() - left.keys()),
            ("has", left.keys() - wanted.keys()),
            ("changed", {name for name in left.keys() & wanted.keys() if left[name] != wanted[name]}),
        )
    ]
    return "; ".join(f"{kind} {', '.join(names[:6])}" for kind, names in parts if names) or "no difference"


def _walk(top: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(top):
        for name in (*folders, *names):
            yield Path(folder, name)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.is_file() else "special"
