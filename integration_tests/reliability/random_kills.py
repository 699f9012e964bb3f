"""Campaign: saves and conversions are killed at random moments, again and again, before one of them is let through."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from calls import CHANGES, Call, Watch
from campaign import Campaign
from forks import forked
from judging import find_truth, fresh, judge, prepared, warm
from scenarios import SCENARIOS, Scenario

FEW = 8  # scenarios in a short run, each of which has one round then
ROUNDS = 40  # of each scenario in a long run
KILLS = 3  # of a round, one after the other
PAUSE = 0.001  # seconds before each call: what takes longer on a slow disk


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        for name in campaign.few(list(filter(campaign.wanted, SCENARIOS)), FEW):
            kill_at_random(campaign, SCENARIOS[name])
        return campaign.end()


def kill_at_random(campaign: Campaign, scenario: Scenario) -> None:
    warm(scenario, campaign.folder / "warm")
    template = prepared(scenario, campaign.folder)
    top = campaign.folder / "top"
    truth = find_truth(scenario, fresh(template, top))
    fresh(template, top)
    began = time.monotonic()
    forked(lambda: act_slowly(scenario, top, None))
    seconds = time.monotonic() - began
    for _ in range(ROUNDS if campaign.long else 1):
        fresh(template, top)
        moments = [campaign.random.uniform(0, seconds) for _ in range(KILLS)]
        for moment in moments:
            forked(lambda moment=moment: act_slowly(scenario, top, moment))  # type: ignore[misc]
        told = ", ".join(f"{moment:.3f}" for moment in moments)
        campaign.case(f"{scenario.name}, killed after {told} seconds", judge(scenario, top, truth))


def act_slowly(scenario: Scenario, top: Path, moment: float | None) -> None:
    """Run a scenario with a pause before each call, and be killed at a moment, wherever that is."""

    def pause(call: Call) -> None:
        time.sleep(PAUSE)

    if moment is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        killer = os.fork()
        if not killer:
            time.sleep(moment)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
    with Watch(top, CHANGES, pause):
        scenario.act(top)
    if moment is not None:
        os.kill(killer, signal.SIGKILL)
        os.waitpid(killer, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
