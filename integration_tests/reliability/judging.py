"""What must hold after an interruption, whatever it was."""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass
from pathlib import Path

import trees
from forks import forked
from readers import read
from scenarios import Scenario
from trees import Tree

import hf_stream
from hf_stream.checkpoint import settle


@dataclass(frozen=True)
class Truth:
    """What a scenario leaves when nothing interrupts it.

    Attributes:
        old: The place's files before.
        new: And after.
        whole: All that is there afterwards, work directories included.
        old_read: What each reader reads before; None for an error.
        new_read: And after.
    """

    old: Tree | None
    new: Tree | None
    whole: Tree
    old_read: tuple[str | None, ...]
    new_read: tuple[str | None, ...]


def find_truth(scenario: Scenario, top: Path) -> Truth:
    """Run a scenario undisturbed, in `top`, which has been prepared."""

    def run() -> Truth:
        place = top / scenario.out
        old, old_read = trees.files(place), _read(scenario, place)
        scenario.act(top)
        return Truth(old, trees.files(place), trees.everything(top), old_read, _read(scenario, place))

    ended = forked(run)
    if ended.value is None:
        raise RuntimeError(f"'{scenario.name}' fails undisturbed: {ended}")
    truth: Truth = ended.value
    return truth


def judge(scenario: Scenario, top: Path, truth: Truth, *, must_be_new: bool = False) -> list[str]:
    """What is wrong with what an interruption has left, looked at in a process of its own.

    1. Plain readers see the old state, the new one or an error; the files themselves are no mixture.
    2. After `settle` it is one of the two, with every byte.
    3. The next run works, and nothing else is left.
    """

    def look() -> list[str]:
        wrong = looked_at(scenario, top, truth, must_be_new)
        for step in (_settled, _run_again):
            try:
                wrong = wrong or step(scenario, top, truth)
            except (OSError, hf_stream.HfStreamError) as error:
                return [f"{step.__name__[1:]}: {type(error).__name__}: {error}"]
        return wrong

    ended = forked(look)
    return ended.value if ended.value is not None else [str(ended)]


def looked_at(scenario: Scenario, top: Path, truth: Truth, must_be_new: bool) -> list[str]:
    place = top / scenario.out
    left = trees.files(place)
    if scenario.many:
        wrong = _of_many(left, truth)
        # What is to go may come back once more; the next run removes it again.
        lacking = must_be_new and not (truth.new or {}).items() <= (left or {}).items()
    else:
        wrong = [said for said in [trees.mixture(left, truth.old, truth.new)] if said]
        lacking = must_be_new and left != truth.new
    if lacking:
        wrong.append(f"it had returned, and yet: {trees.difference(left, truth.new)}")
    for number, seen in enumerate(_read(scenario, place)):
        if seen not in (None, truth.old_read[number], truth.new_read[number]):
            wrong.append(f"{scenario.readers[number].__name__} reads what was never saved")
    return wrong


def _of_many(left: Tree | None, truth: Truth) -> list[str]:
    """The same of a directory of checkpoints: each is whole, old or new, and one is there always."""
    left, old, new = (_by_folder(tree) for tree in (left, truth.old, truth.new))
    wrong = [
        f"{name} is neither old nor new: {trees.difference(files, new.get(name) or old.get(name))}"
        for name, files in left.items()
        if files not in (old.get(name), new.get(name))
    ]
    if not any(files in (old.get(name), new.get(name)) for name, files in left.items()):
        wrong.append("no whole checkpoint is left")
    return wrong


def _by_folder(tree: Tree | None) -> dict[str, Tree]:
    found: dict[str, Tree] = {}
    for name, content in (tree or {}).items():
        folder, _, rest = name.partition("/")
        found.setdefault(folder, {})[rest] = content
    return found


def _settled(scenario: Scenario, top: Path, truth: Truth) -> list[str]:
    place = top / scenario.out
    if scenario.many:
        return []
    settle(place)
    left = trees.files(place)
    if left in (truth.old, truth.new) or (left is None and truth.old is None):
        return []
    return [f"after settle it is neither: {trees.difference(left, truth.new)} of the new"]


def _run_again(scenario: Scenario, top: Path, truth: Truth) -> list[str]:
    scenario.act(top)
    left = trees.everything(top)
    return [] if left == truth.whole else [f"the next run leaves: {trees.difference(left, truth.whole)}"]


def _read(scenario: Scenario, place: Path) -> tuple[str | None, ...]:
    return tuple(read(reader, place) for reader in scenario.readers)


def prepared(scenario: Scenario, folder: Path) -> Path:
    """A directory as a scenario finds it, to be copied for each of its runs."""
    template = folder / "template"
    shutil.rmtree(template, ignore_errors=True)
    template.mkdir(parents=True)
    ended = forked(lambda: scenario.prepare(template))
    if ended.error or ended.signal is not None:
        raise RuntimeError(f"'{scenario.name}' cannot be prepared: {ended}")
    return template


def fresh(template: Path, top: Path) -> Path:
    """The same directory, always under the same name, as files may tell where they were written."""
    shutil.rmtree(top, ignore_errors=True)
    shutil.copytree(template, top, symlinks=True)
    return top


def warm(scenario: Scenario, folder: Path) -> None:
    """Do it once in this process: what is imported on the way, every child would import anew."""
    top = folder / scenario.name
    top.mkdir(parents=True)
    scenario.prepare(top)
    scenario.act(top)
    gc.collect()
    gc.freeze()  # children need no copies then of what they only count
