"""Campaign: a save or a conversion is killed before every call that changes something, and within every write."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from calls import CHANGES, DATA, Watch, kill_at, noted
from campaign import Campaign
from forks import forked
from judging import Truth, find_truth, fresh, judge, prepared, warm
from scenarios import SCENARIOS, Scenario

FEW = 4  # moments of each scenario in a short run


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        for name, scenario in SCENARIOS.items():
            if campaign.wanted(name):
                kill_everywhere(campaign, scenario)
        return campaign.end()


def kill_everywhere(campaign: Campaign, scenario: Scenario) -> None:
    warm(scenario, campaign.folder / "warm")
    template = prepared(scenario, campaign.folder)
    top = campaign.folder / "top"
    truth = find_truth(scenario, fresh(template, top))
    fresh(template, top)
    names: list[str] = forked(lambda: noted(lambda: scenario.act(top), top)).value
    moments = [(number, False) for number in range(len(names))]
    moments += [(number, True) for number, name in enumerate(names) if name.split()[0] in DATA]
    for number, within in campaign.few(moments, FEW):
        fresh(template, top)
        kill(campaign, scenario, top, truth, number, within, names[number])


def kill(campaign: Campaign, scenario: Scenario, top: Path, truth: Truth, number: int, within: bool, name: str) -> None:
    def run() -> None:
        with Watch(top, CHANGES, kill_at(number, within)):
            scenario.act(top)

    ended = forked(run)
    label = f"{scenario.name}, {'within' if within else 'before'} call {number} ({name})"
    campaign.case(label, judge(scenario, top, truth) if ended.killed else [f"it was not killed: {ended}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
