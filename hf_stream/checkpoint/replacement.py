"""Replacing the files of a directory by new ones: never do old and new ones lie side by side, whenever it stops."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable
from enum import Enum, auto
from pathlib import PurePosixPath

from hf_stream.checkpoint.folder import FileState, Folder
from hf_stream.checkpoint.journal import Replacement
from hf_stream.formats import is_weight_file

# What libraries look for first when they load a directory.
_LOADED_FIRST = re.compile(r"(.*[._-])?config\.json|model_index\.json|modules\.json", re.DOTALL)
# Libraries look for weights under these names, in several formats: what they find first counts.
_OF_ONE_KIND = re.compile(r"(?P<kind>adapter_|diffusion_)?(pytorch_)?model[-.].*", re.DOTALL)
_LISTED = 3
# No program becomes one that runs with other rights because a file of a downloaded directory did.
_PERMISSIONS = 0o777

logger = logging.getLogger(__name__)


class Stage(Enum):
    """How far a replacement has come that another run has begun."""

    UNDER_WAY = auto()
    """Old files may be gone, and new ones are not in place."""
    DONE = auto()
    SUPERSEDED = auto()
    """Somebody else has put other weights there since, and theirs count; or nothing is left of the new ones."""
    UNKNOWN = auto()
    """The new files are not all there, or not as they were written. They may be the only ones left."""


def plan_replacement(folder: Folder, staged: Folder, *, entry: str, stale: re.Pattern[str] | None) -> Replacement:
    """Say what goes and what comes, after everything that could get in the way has been seen to.

    Args:
        folder: The directory.
        staged: The new files, all of them.
        entry: That of the new files which names the others, or one that is as good.
        stale: Matches the names of old weight files, which go; also in the folders that new ones are in.

    Raises:
        CheckpointError: Something in the directory is in the way. Nothing there has been changed.
    """
    names = sorted(staged.all_names(), key=lambda name: (_rank(name, entry), name))
    states = states_before(folder, names, stale)
    hidden = {name: _known(folder, name) for name in _rivals(folder, states)}
    new = {}
    for name in names:
        folder.make_parents(name)
        mode = folder.mode(name)
        if mode is not None:
            os.chmod(staged.path / name, mode & _PERMISSIONS)
        new[name] = _known(staged, name)
    old = {name: state for name, state in states.items() if state is not None}
    # Weights first, and of these the index: what is left then is not taken for a checkpoint.
    ordered = sorted(old, key=lambda name: (not is_weight_file(name), *_index_first(name)))
    return Replacement({name: old[name] for name in ordered}, new, hidden)


def states_before(folder: Folder, names: Collection[str], stale: re.Pattern[str] | None) -> dict[str, FileState | None]:
    """What is there under the names of new files, and of old weight files that go when they come."""
    parents = {"", *map(os.path.dirname, names)}
    there = [name for parent in sorted(parents) for name in folder.names(parent)]
    going = {name for name in (*there, *names) if stale is not None and stale.fullmatch(name)}
    return {name: folder.state(name) for name in sorted({*going, *names})}


def is_one_step(replacement: Replacement) -> bool:
    """Whether one file takes the place of one file, or of none, and has done so in one step: that needs no journal."""
    return len(replacement.new) == 1 and replacement.old.keys() <= replacement.new.keys()


def replace(replacement: Replacement, folder: Folder, staged: Folder) -> None:
    """Remove the old files, and move the new ones in. May be repeated after an interruption: it goes on.

    Raises:
        OSError: Something cannot be moved or removed.
    """
    if not is_one_step(replacement):
        for name, state in replacement.hidden.items():
            if folder.state(name) == state:
                staged.make_parents(name)
                staged.take(name, folder)
        for name, state in replacement.old.items():
            if folder.state(name) == state != replacement.new.get(name):
                folder.unlink(name)
    for name, state in replacement.new.items():
        if staged.state(name) == state:
            folder.make_parents(name)
            folder.take(name, staged)
    show(replacement, folder, staged)


def show(replacement: Replacement, folder: Folder, staged: Folder) -> None:
    """Put back what was hidden, unless somebody has put something else there."""
    for name in replacement.hidden:
        if staged.state(name) is not None and folder.state(name) is None:
            folder.make_parents(name)
            folder.take(name, staged)


def stage_of(replacement: Replacement, folder: Folder, staged: Folder | None) -> Stage:
    """How far a replacement has come, whoever has changed the directory since it began.

    Args:
        replacement: What was to be done.
        folder: The directory.
        staged: The new files that are not in place yet; None if there are none.
    """
    coming = {**replacement.new, **replacement.hidden}

    def waits() -> set[str]:
        return {name for name, state in coming.items() if staged is not None and staged.state(name) == state}

    # Twice: a file that is moved meanwhile, in or out, is seen all the same.
    waiting = waits()
    missing = {name for name, state in coming.items() if folder.state(name) != state}
    waiting |= waits()
    changed = {name for name in coming if staged is not None and name not in waiting and staged.state(name) is not None}
    strange = _strange(replacement, folder)
    lost = set(filter(is_weight_file, missing - waiting - strange))
    newer = any(map(is_weight_file, strange))
    if changed or (lost and waiting and not newer):
        return Stage.UNKNOWN
    if lost or newer:
        return Stage.SUPERSEDED
    return Stage.UNDER_WAY if missing & waiting else Stage.DONE


def keep_changed(replacement: Replacement, folder: Folder) -> Replacement:
    """The same without the small files that somebody has changed since: theirs stay."""
    strange = _strange(replacement, folder)
    if strange:
        logger.warning("'%s': %s changed since a save was cut short, and stays as it is", folder.path, _listed(strange))
    old, new = (
        {name: state for name, state in states.items() if name not in strange}
        for states in (replacement.old, replacement.new)
    )
    return Replacement(old, new, replacement.hidden)


def _strange(replacement: Replacement, folder: Folder) -> set[str]:
    """Files that neither were there when the replacement began nor came with it."""
    known = (replacement.old, replacement.new, replacement.hidden)
    names = {name for states in known for name in states}
    found = {name: folder.state(name) for name in names.union(_rivals(folder, names))}
    return {
        name
        for name, state in found.items()
        if state is not None and all(state != states.get(name) for states in known)
    }


def _rank(name: str, entry: str) -> int:
    """When a new file comes: first the weights, then small files, then what others look for, and last the entry."""
    if name == entry:
        return 3
    if _LOADED_FIRST.fullmatch(PurePosixPath(name).name):
        return 2
    return 0 if is_weight_file(name) else 1


def _rivals(folder: Folder, names: Collection[str]) -> list[str]:
    """Further weights that a library may load in the place of these, or before them."""
    kinds = {kind for name in names if (kind := _kind(name)) is not None}
    found = (name for parent in sorted({parent for parent, _ in kinds}) for name in folder.names(parent))
    return sorted((name for name in found if name not in names and _kind(name) in kinds), key=_index_first)


def _kind(name: str) -> tuple[str, str] | None:
    """The folder and the kind of weights; None for what no library looks for by its name."""
    path = PurePosixPath(name)
    found = _OF_ONE_KIND.fullmatch(path.name) if is_weight_file(name) else None
    if found is None:
        return None
    return "" if str(path.parent) == "." else str(path.parent), found["kind"] or ""


def _index_first(name: str) -> tuple[bool, str]:
    return not name.endswith(".json"), name


def _known(folder: Folder, name: str) -> FileState:
    state = folder.state(name)
    if state is None:
        raise FileNotFoundError(2, "it went away", os.fspath(folder.path / name))
    return state


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return ", ".join(f"'{name}'" for name in shown[:_LISTED]) + more
