"""Campaign: hostile directories never make us touch anything outside of them, hang, or fail without words."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import trees
from campaign import Campaign
from forks import forked
from plants import WORK_PLACES, Plant, plants, victim
from readers import is_ours
from scenarios import QUIET, llama, trainer_checkpoint

import hf_stream
import hf_stream.checkpoint

FEW = 110  # plants of each kind of entry in a short run, of some hundreds
SECONDS = 20.0
MEMORY = 2 << 30  # bytes beyond what a process has when it starts

X = {"x": torch.ones(3), "y": torch.ones(4)}


def _clean(place: Path) -> None:
    hf_stream.checkpoint.clean(place)  # type: ignore[attr-defined, unused-ignore]


def _read(place: Path) -> None:
    for tensor in hf_stream.open_checkpoint(place).values():
        tensor.materialize()


def _abandon(place: Path) -> None:
    hf_stream.CheckpointWriter(place, X).abandon()


def _train(place: Path) -> None:
    trainer_checkpoint(3, place.parent, out=place.name)


def _resume(place: Path) -> None:
    _trainer(place)._load_from_checkpoint(str(place))


def _save_model(place: Path) -> None:
    _trainer(place).save_model(str(place))


def _trainer(place: Path) -> Any:
    from trainings import llama as trained
    from trainings import trainer

    return trainer(trained(), place, hf_stream.StreamingCheckpointCallback(hf_stream.Layout([])))


def _from_pretrained(place: Path) -> None:
    from transformers import LlamaForCausalLM

    hf_stream.from_pretrained(LlamaForCausalLM, place, local_files_only=True)


def _command(*arguments: str) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        from hf_stream.cli import main as command_line

        try:
            command_line([argument.format(place) for argument in arguments])
        except SystemExit as ended:
            if ended.code not in (0, 1, 2):
                raise

    return run


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "open": _read,
    "settle": hf_stream.checkpoint.settle,
    "clean": _clean,
    "save": lambda place: hf_stream.save_checkpoint(X, place, **QUIET),
    "save into a new directory": lambda place: (shutil.rmtree(place), hf_stream.save_checkpoint(X, place, **QUIET)),
    "save_nested to a folder": lambda place: hf_stream.save_nested({"a": [X]}, place, max_shard_size=30, **QUIET),
    "save_nested to a file": lambda place: hf_stream.save_nested({"a": [X]}, place / "s.safetensors", **QUIET),
    "load_nested": hf_stream.load_nested,
    "convert into it": lambda place: hf_stream.convert(place.parent / "good", place, **QUIET),
    "convert it": lambda place: hf_stream.convert(place, place.parent / "converted", **QUIET),
    "verify": lambda place: hf_stream.verify(place, place.parent / "good"),
    "writer, abandoned": _abandon,
    "save_pretrained": lambda place: hf_stream.save_pretrained(llama(2.0), place, **QUIET),
    "Trainer": _train,
    "resume": _resume,
    "save_model": _save_model,
    "from_pretrained": _from_pretrained,
    "hf-stream clean": _command("clean", "{}"),
    "hf-stream inspect": _command("inspect", "{}"),
    "hf-stream verify": _command("verify", "{}", "{}/../good"),
}
# What meets a plant in these places; all entries, for the others.
_WHO_MEETS = {
    "../": ("clean", "save into a new directory", "convert into it", "save", "hf-stream clean"),
    ".s.": ("clean", "save_nested to a file", "hf-stream clean"),
    "_checkpoint": ("clean", "Trainer", "save", "open"),
    "hf_stream.json": ("Trainer", "resume", "save_model", "convert it", "save_pretrained", "from_pretrained"),
    "model": (
        "open",
        "save",
        "convert into it",
        "convert it",
        "verify",
        "save_pretrained",
        "resume",
        "from_pretrained",
    ),
}
# These end with an error of transformers' own where a file of the checkpoint is no good.
_THEIRS = ("from_pretrained", "Trainer", "resume", "save_model", "save_pretrained")


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        top = campaign.folder / "top"
        template = campaign.folder / "template"
        victim(template / "victim")
        victim(template / "good")
        _canaries(template / "outside")
        _import_all(template, campaign.folder / "imports")
        cases = [
            (name, plant, entry)
            for name, plant in plants(top / "outside", campaign.random)
            for entry in next((met for place, met in _WHO_MEETS.items() if name.startswith(place)), ENTRIES)
            if campaign.wanted(f"{name}, then {entry}")
            # Transformers itself reads these to their end, which they have not.
            and not (entry == "from_pretrained" and name.endswith(("pipe", "device", "/dev/zero")))
        ]
        for name, plant, entry in campaign.few(cases, FEW):
            shutil.rmtree(top, ignore_errors=True)
            shutil.copytree(template, top)
            campaign.case(f"{name}, then {entry}", attempt(top, plant, entry))
        return campaign.end()


def attempt(top: Path, plant: Plant, entry: str) -> list[str]:
    """Plant something, go in through one entry, and see what that did to the canaries."""
    place, outside = top / "victim", top / "outside"
    plant(place, outside)
    before = _state(outside)
    wrong = _through(place, entry)
    if _state(outside) != before:
        wrong.append("something outside was touched")
    if entry == "clean" and not wrong:
        # A Trainer removes its own when it begins.
        left = [name for name in WORK_PLACES if os.path.lexists(place / name) and not name.startswith("_")]
        wrong += [f"clean leaves {left}"] if left else _through(place, "save")
    return wrong


def _through(place: Path, entry: str) -> list[str]:
    def run() -> str | None:
        _limit_memory()
        os.chdir("/")
        try:
            ENTRIES[entry](place)
        except (hf_stream.HfStreamError, OSError):
            return None
        except Exception as error:
            if entry in _THEIRS and not is_ours(error):
                return None
            raise
        return None

    ended = forked(run, SECONDS, quiet=True)
    said = ended.value or ended.error
    if ended.late or ended.signal is not None:
        said = str(ended)
    return [said] if said else []


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _canaries(outside: Path) -> None:
    for name in ("canary.txt", "model.safetensors", "sub/canary.txt", "files/canary.txt", "a/b/c"):
        path = outside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the canary {name}")
        path.chmod(0o640)
        os.utime(path, (10**9, 10**9))


def _state(outside: Path) -> dict[str, object]:
    """All that can be told of what is outside, but how many names it has."""
    found: dict[str, object] = dict(trees.everything(outside))
    for path in (outside, *outside.rglob("*")):
        status = path.lstat()
        found[f"{path.relative_to(outside)}:"] = (status.st_mode, status.st_mtime_ns, status.st_size, status.st_uid)
    return found


def _import_all(template: Path, top: Path) -> None:
    """Go through every entry once in this process: what is imported on the way, every child would import anew."""
    for entry, call in ENTRIES.items():
        shutil.rmtree(top, ignore_errors=True)
        shutil.copytree(template, top)
        try:
            with redirect_stdout(StringIO()):
                call(top / "victim")
        except (hf_stream.HfStreamError, OSError, ValueError, AttributeError) as error:
            print(f"without any plant, {entry}: {type(error).__name__}: {error}"[:200])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
