"""Campaign: each call to the file system fails once, with an errno that such calls fail with."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import trees
from calls import CHANGES, DATA, LOCKS, NAMES, READS, SPACE, Watch, fail_at, noted
from campaign import Campaign
from forks import forked
from judging import Truth, find_truth, fresh, looked_at, prepared, warm
from scenarios import SCENARIOS, Scenario

import hf_stream

FEW = 4  # calls of each scenario in a short run
WATCHED = CHANGES | READS | LOCKS


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        for name, scenario in SCENARIOS.items():
            if campaign.wanted(name):
                fail_everywhere(campaign, scenario)
        return campaign.end()


def fail_everywhere(campaign: Campaign, scenario: Scenario) -> None:
    warm(scenario, campaign.folder / "warm")
    template = prepared(scenario, campaign.folder)
    top = campaign.folder / "top"
    truth = find_truth(scenario, fresh(template, top))
    fresh(template, top)
    calls: list[str] = forked(lambda: noted(lambda: scenario.act(top), top, WATCHED)).value
    for number in campaign.few(range(len(calls)), FEW):
        fresh(template, top)
        code = campaign.random.choice(_codes(calls[number].split()[0]))
        wrong = fail(scenario, top, truth, number, code)
        campaign.case(f"{scenario.name}, call {number} ({calls[number]}) fails with {errno.errorcode[code]}", wrong)


def fail(scenario: Scenario, top: Path, truth: Truth, number: int, code: int) -> list[str]:
    """Let one call fail, look at what is there, and run again in the same process, where a lock might be left."""

    def run() -> list[str]:
        wrong = []
        done = True
        try:
            with Watch(top, WATCHED, fail_at(number, code)):
                scenario.act(top)
        except (hf_stream.HfStreamError, OSError) as error:
            done = False
            if os.strerror(code) not in str(error) and getattr(error, "errno", None) != code:
                wrong.append(f"the error does not say '{os.strerror(code)}': {type(error).__name__}: {error}")
        wrong += looked_at(scenario, top, truth, must_be_new=done)
        scenario.act(top)
        left = trees.everything(top)
        if left != truth.whole:
            wrong.append(f"the next run leaves: {trees.difference(left, truth.whole)}")
        return wrong

    ended = forked(run, quiet=True)
    return ended.value if ended.value is not None else [str(ended)]


def _codes(name: str) -> tuple[int, ...]:
    """What a call may fail with."""
    if name in LOCKS:
        return (errno.ENOLCK, errno.ENOSYS)
    if name in DATA | SPACE:
        return (errno.ENOSPC, errno.EIO, errno.EDQUOT)
    if name in ("create", "open", "scandir", "listdir"):
        return (errno.EMFILE, errno.EACCES, errno.EIO)
    if name in NAMES:
        return (errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC)
    return (errno.EIO, errno.EACCES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
