"""Campaign: the disk becomes full at every step, by bytes and by files."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import trees
from campaign import Campaign
from disk import NoDiskError, SmallDisk
from forks import forked
from judging import Truth, find_truth, warm
from scenarios import SCENARIOS, Scenario

import hf_stream

FEW = 4  # amounts of room for each scenario in a short run
PAGE = 4096
PLENTY = {"size": 64 << 20, "nr_inodes": 10_000}


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        for name, scenario in SCENARIOS.items():
            if campaign.wanted(name):
                try:
                    fill(campaign, scenario)
                except NoDiskError as error:
                    campaign.skip(name, error)
        return campaign.end()


def fill(campaign: Campaign, scenario: Scenario) -> None:
    """Leave each amount of room, or some amounts, from none to what is more than enough."""
    warm(scenario, campaign.folder / "warm")
    with SmallDisk(campaign.folder / "small") as disk:
        template = campaign.folder / "template"
        shutil.rmtree(template, ignore_errors=True)
        template.mkdir()
        forked(lambda: scenario.prepare(template))
        top = _fresh(disk, template)
        truth = find_truth(scenario, top)
        needed = {"size": 40, "nr_inodes": 40}
        cases = [(kind, room) for kind in PLENTY for room in range(needed[kind])]
        for kind, room in campaign.few(cases, FEW):
            top = _fresh(disk, template)
            disk.leave(kind, room * (PAGE if kind == "size" else 1))
            unit = "pages" if kind == "size" else "files"
            campaign.case(f"{scenario.name}, room for {room} {unit}", attempt(scenario, disk, top, truth))


def attempt(scenario: Scenario, disk: SmallDisk, top: Path, truth: Truth) -> list[str]:
    before = trees.everything(top)

    def run() -> list[str]:
        wrong = []
        try:
            scenario.act(top)
        except (hf_stream.HfStreamError, OSError) as error:
            if "No space left" not in str(error):
                wrong.append(f"the error does not say 'No space left': {type(error).__name__}: {error}")
            left = trees.everything(top)
            # A conversion keeps the files that are finished.
            if left != before and not scenario.name.startswith(("convert", "partitions")):
                wrong.append(f"something was left or lost: {trees.difference(left, before)}")
            if trees.files(top / scenario.out) != truth.old:
                wrong.append("the destination is not as it was")
        else:
            if trees.everything(top) != truth.whole:
                wrong.append(f"it had returned, and yet: {trees.difference(trees.everything(top), truth.whole)}")
        disk.leave("size", PLENTY["size"])
        disk.leave("nr_inodes", PLENTY["nr_inodes"])
        scenario.act(top)
        if trees.everything(top) != truth.whole:
            wrong.append(f"with room again: {trees.difference(trees.everything(top), truth.whole)}")
        return wrong

    ended = forked(run, quiet=True)
    return ended.value if ended.value is not None else [str(ended)]


def _fresh(disk: SmallDisk, template: Path) -> Path:
    disk.empty(**PLENTY)
    top = disk.top / "top"
    shutil.copytree(template, top)
    return top


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
