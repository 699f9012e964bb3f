"""Campaign: a save is killed while it replaces a checkpoint, and then others save newer weights there: theirs stay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import trees
from calls import CHANGES, Watch, kill_at, noted
from campaign import Campaign
from forks import forked
from judging import fresh, prepared, warm
from readers import opened, read, transformers
from scenarios import QUIET, SCENARIOS, Scenario, plain_model

import hf_stream
from hf_stream.checkpoint import settle

FEW = 10  # of each scenario in a short run
OVER = ("save shards over one file", "save shards over shards", "convert over shards", "save_pretrained over a .bin")
X = {"x": torch.ones(3)}


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        for name in OVER:
            if campaign.wanted(name):
                supersede(campaign, SCENARIOS[name])
        return campaign.end()


def supersede(campaign: Campaign, scenario: Scenario) -> None:
    warm(scenario, campaign.folder / "warm")
    template = prepared(scenario, campaign.folder)
    top = fresh(template, campaign.folder / "top")
    calls: list[str] = forked(lambda: noted(lambda: scenario.act(top), top)).value
    # Nothing stale is left by what has not begun to replace anything.
    moments = list(range(len(calls) // 2, len(calls)))
    cases = [(number, kind, entry) for number in moments for kind in NEWER for entry in ENTRIES]
    for number, kind, entry in campaign.few(cases, FEW):
        fresh(template, top)
        label = f"{scenario.name}, killed before call {number} ({calls[number]}), newer {kind}, then {entry}"
        campaign.case(label, attempt(scenario, top, number, kind, entry))


def attempt(scenario: Scenario, top: Path, number: int, kind: str, entry: str) -> list[str]:
    place = top / "out"

    def killed() -> None:
        with Watch(top, CHANGES, kill_at(number)):
            scenario.act(top)

    def run() -> list[str]:
        NEWER[kind](place)
        newer = trees.files(place) or {}
        seen = read(transformers, place)
        with suppress(hf_stream.HfStreamError, ZeroDivisionError):
            ENTRIES[entry](place)
        left = trees.files(place) or {}
        wrong = [] if newer.items() <= left.items() else [f"newer work is gone: {trees.difference(left, newer)}"]
        if read(transformers, place) != seen:
            wrong.append("transformers reads something else than before")
        with suppress(hf_stream.HfStreamError):
            settle(place)
        if read(opened, place) is None:
            wrong.append("and it cannot be opened")
        return wrong

    if not forked(killed).killed:
        return ["it was not killed"]
    ended = forked(run)
    return ended.value if ended.value is not None else [str(ended)]


def _one_file(place: Path) -> None:
    for index in place.glob("*.index.json"):
        index.unlink()
    plain_model(place, 3.0, "single")


NEWER: dict[str, Callable[[Path], None]] = {
    "file": _one_file,
    "shards": lambda place: plain_model(place, 3.0, "sharded"),
}


def _abandoned(place: Path) -> None:
    hf_stream.CheckpointWriter(place, X).abandon()


def _failed(place: Path) -> None:
    class Fails:
        def update(self, n: int) -> None:
            raise ZeroDivisionError

    hf_stream.save_checkpoint(X, place, progress=Fails())


def _too_large(place: Path) -> None:
    hf_stream.save_checkpoint({"x": torch.empty(1, device="meta")}, place, **QUIET)


ENTRIES: dict[str, Callable[[Path], object]] = {
    "settle": settle,
    "a writer that is abandoned": _abandoned,
    "a save that fails": _failed,
    "a save of what has no data": _too_large,
    "open": hf_stream.open_checkpoint,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
