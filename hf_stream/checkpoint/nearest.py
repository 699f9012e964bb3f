"""Names like one that is not there: what a misspelt name of a tensor, or a path, was meant to be."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_NUMBER: Final = re.compile(r"\d+")
_SHOWN: Final = 3
_CANDIDATES: Final = 5000


def no_such_name(name: object, names: Iterable[str], what: str) -> str:
    """The message for a name that is not there.

    Args:
        name: The name.
        names: Those that are there.
        what: What has them, in words.
    """
    names = list(names)
    if not isinstance(name, str):
        example = f", such as '{names[0]}'" if names else ""
        return f"{name!r:.100} is no name: {what} is indexed by the names of its tensors{example}"
    close = nearest(name, names)
    listed = ", ".join(f"'{near}'" for near in close)
    hint = (
        f"the nearest {'are' if len(close) > 1 else 'is'} {listed}" if close else "none is like it" + _examples(names)
    )
    return f"{what} has no tensor '{name}'; {hint}"


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The few names that are most like this one, the most alike first."""
    # Names that differ in numbers alone are compared once: a checkpoint has as many of them as layers and experts.
    families: dict[str, list[str]] = {}
    for other in names:
        families.setdefault(_NUMBER.sub("0", other), []).append(other)
    close = difflib.get_close_matches(_NUMBER.sub("0", name), list(families)[:_CANDIDATES], n=_SHOWN, cutoff=0.7)
    numbers = _NUMBER.findall(name)
    return [next((n for n in families[key] if _NUMBER.findall(n) == numbers), families[key][0]) for key in close]


def _examples(names: list[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return f" ({listed}{', ...' if len(names) > _SHOWN else ''})" if names else ""


def no_such_path(path: Path) -> str:
    """The message for a checkpoint that is not there, with what may have been meant."""
    fact = f"'{path}' does not exist"
    if path.parts[:1] and path.parts[0].startswith("~"):
        return f"{fact}: only shells know what '~' is; pass os.path.expanduser('{path}')"
    beside = os.listdir(path.parent)[:_CANDIDATES] if path.parent.is_dir() else []
    if close := difflib.get_close_matches(path.name, beside, n=1):
        return f"{fact}; did you mean '{path.with_name(close[0])}'?"
    if len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists() and not path.suffix:
        return f"{fact}; if it is a repository of the Hub, pass huggingface_hub.snapshot_download('{path}')"
    return f"{fact}; pass a directory, a weight file, an index file or a pattern"
