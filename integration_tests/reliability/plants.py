"""What a hostile download may hold: work directories, journals, links, records and indexes that nobody of us wrote."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from calls import CHANGES, Call, Watch
from forks import forked
from safetensors.torch import save_file
from scenarios import plain_model

import hf_stream

# Puts something hostile into a checkpoint's directory (the first) that aims at another one (the second).
Plant = Callable[[Path, Path], object]

DEEP = b"[" * 100_000
WORK = ".hf-stream"
# The places where something of ours may be: in the directory, beside it, for a file in it, and for a Trainer.
WORK_PLACES = (WORK, "../.victim.hf-stream", ".s.safetensors.hf-stream", "_checkpoint-3.hf-stream")
INSIDE = ("lock", "journal.json", "journal.json.new", "files", "growing", "files/sub", "growing/sub")
OF_A_TRAINER = ("lock", "checkpoint-3", "replaced", "removed")


def victim(directory: Path) -> None:
    """A checkpoint that is all right, in shards, and a state beside it."""
    plain_model(directory, 1.0, "sharded")
    save_file({"x": torch.ones(3)}, directory / "s.safetensors.old")


def names(outside: Path) -> list[str]:
    """Names that lead out of a directory, or are none."""
    return [
        f"{outside}/canary.txt",
        "../outside/canary.txt",
        "files/../../../outside/canary.txt",
        "way/canary.txt",
        "..",
        ".",
        "",
        "/",
        "~/x",
        "a\0b",
        "x" * 5000,
        "\udc80",
        "lock",
        ".hf-stream/lock",
    ]


STRANGE_VALUES: tuple[Any, ...] = (None, True, -1, 1 << 80, 1e400, "", "x", [], {}, [[]], {"": None}, [None], [["x"]])


def plants(outside: Path, rng: random.Random) -> Iterator[tuple[str, Plant]]:
    """Every plant, with its name."""
    yield "nothing", lambda place, outside: None
    for work in WORK_PLACES:
        yield from ((f"{work} {name}", plant) for name, plant in _in_place_of(work, DIRECTORY))
        for inner in OF_A_TRAINER if work.startswith("_") else INSIDE:
            kinds = FILE if "." in inner or inner == "lock" else DIRECTORY
            yield from ((f"{work}/{inner} {name}", plant) for name, plant in _in_place_of(f"{work}/{inner}", kinds))
        for number, content in enumerate(_journals(outside)):
            yield f"{work}/journal.json, strange content {number}", _file(f"{work}/journal.json", content)
    for number in range(60):
        yield f"a journal of ours, changed ({number})", _changed_journal(rng.randrange(1 << 32), number % 6 == 0)
    for name in ("hf_stream.json", "model.safetensors.index.json"):
        yield from ((f"{name} {kind}", plant) for kind, plant in _in_place_of(name, FILE))
        for number, content in enumerate(_records(outside)):
            yield f"{name}, strange content {number}", _file(name, content)
    for name in ("model-00001-of-00002.safetensors", "tokenizer.json"):
        yield from ((f"{name} {kind}", plant) for kind, plant in _in_place_of(name, LINKS))


def _journals(outside: Path) -> Iterator[bytes]:
    yield from (b"", b"{", b"\xff\xfe", b"NaN", b"[]", b'"x"', DEEP, b'{"replacing": ' + DEEP, b'{"a":' * 100_000)
    for name in names(outside):
        for steps in (
            {"remove": [name], "move": []},
            {"remove": [], "move": [name]},
            {"remove": [name], "move": [name]},
        ):
            yield json.dumps({"fingerprint": None, "replacing": steps}).encode()
    for value in STRANGE_VALUES:
        for journal in ({"replacing": value}, {"replacing": {"remove": value, "move": value}}, {"fingerprint": value}):
            yield json.dumps(journal).encode()


def _records(outside: Path) -> Iterator[bytes]:
    yield from (b"", b"{", b"\xff\xfe", DEEP, b'{"weight_map": ' + DEEP, b'{"layout": ' + DEEP)
    for name in names(outside):
        yield json.dumps({"weight_map": {"model.norm.weight": name}, "layout": name}).encode()
    for value in STRANGE_VALUES:
        yield json.dumps({"weight_map": value, "layout": value}).encode()
        yield json.dumps({"weight_map": {"a": value}, "layout": [value]}).encode()
        yield json.dumps(value).encode()


def _file(name: str, content: bytes) -> Plant:
    def plant(place: Path, outside: Path) -> None:
        _made_way(place, name).write_bytes(content)
        _way_out(place, outside)

    return plant


def _way_out(place: Path, outside: Path) -> None:
    """A folder `way` that leads outside, where names may go through, staged and in place."""
    for folder in (place, place / WORK / "files"):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(folder / "way"):
            (folder / "way").symlink_to(outside)
        (folder / "canary.txt").write_text("not the canary")


def _made_way(place: Path, name: str) -> Path:
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _huge(path: Path, outside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


Kinds = dict[str, Callable[[Path, Path], object]]

LINKS: Kinds = {
    "links to a file outside": lambda path, outside: path.symlink_to(outside / "canary.txt"),
    "links to a directory outside": lambda path, outside: path.symlink_to(outside),
    "links to a relative place": lambda path, outside: path.symlink_to(os.path.relpath(outside, path.parent)),
    "links to nothing outside": lambda path, outside: path.symlink_to(outside / "new"),
    "links to itself": lambda path, outside: path.symlink_to(path.name),
    "links to /dev/zero": lambda path, outside: path.symlink_to("/dev/zero"),
}
SPECIAL: Kinds = {
    "is a pipe": lambda path, outside: os.mkfifo(path),
    "is a device": lambda path, outside: os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5)),
}
DIRECTORY: Kinds = {
    **LINKS,
    **SPECIAL,
    "is a file": lambda path, outside: path.write_bytes(b"x"),
    "holds a link": lambda path, outside: (path.mkdir(), (path / "a").symlink_to(outside)),
    "holds a link to a file": lambda path, outside: (
        path.mkdir(),
        (path / "model.safetensors").symlink_to(outside / "canary.txt"),
    ),
    "holds another name of the canary": lambda path, outside: (
        path.mkdir(),
        (path / "model.safetensors").hardlink_to(outside / "canary.txt"),
    ),
    "holds a pipe": lambda path, outside: (path.mkdir(), os.mkfifo(path / "model.safetensors")),
    "is deep": lambda path, outside: os.makedirs(path / "/".join("d" * 400)),
}
FILE: Kinds = {
    **LINKS,
    **SPECIAL,
    "is a directory": lambda path, outside: path.mkdir(),
    "is another name of the canary": lambda path, outside: path.hardlink_to(outside / "canary.txt"),
    "is huge": _huge,
}


def _in_place_of(name: str, kinds: Kinds) -> Iterator[tuple[str, Plant]]:
    for kind, make in kinds.items():
        yield kind, lambda place, outside, make=make: make(_made_way(place, name), outside)


def _changed_journal(seed: int, replaced: bool) -> Plant:
    """A save of ours that was cut short just here, whose journal somebody has changed in one place."""

    def plant(place: Path, outside: Path) -> None:
        rng = random.Random(seed)
        _cut_short(place)
        journal = place / WORK / "journal.json"
        content = json.loads(journal.read_bytes())
        if replaced:
            journal.write_bytes(rng.choice(list(_journals(outside))))
        else:
            where = rng.choice(list(_places(content)))
            name = rng.random() < 0.7
            _put(content, where, rng.choice(names(outside) if name else STRANGE_VALUES))
            journal.write_text(json.dumps(content))
        _way_out(place, outside)

    return plant


def _cut_short(place: Path) -> None:
    """Kill a save after its journal says what is to be replaced: when it has removed the first file."""

    def on_call(call: Call) -> None:
        if call.name in ("unlink", "remove", "rename", "replace") and _is_old(call):
            os._exit(0)

    def _is_old(call: Call) -> bool:
        return os.path.dirname(call.path) == str(place) and call.path.endswith((".safetensors", "index.json"))

    def save() -> None:
        with Watch(place, CHANGES, on_call):
            hf_stream.save_checkpoint({"x": torch.ones(3), "y": torch.ones(3)}, place, max_shard_size=12)

    forked(save)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every value in a nesting, and every key, as a path to it; of a key, with None after it."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))
        if isinstance(value, dict):
            yield (*path, key, None)


def _put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    if path[-1] is None:
        *path_to, key, _ = path
    else:
        *path_to, key = path
    for step in path_to:
        value = value[step]
    if path[-1] is None:
        value[new if isinstance(new, str) else repr(new)] = value.pop(key)
    else:
        value[key] = new
