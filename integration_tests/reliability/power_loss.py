"""Campaign: the power is cut before a call that changes something, after the last one, and a while later."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from calls import CHANGES, Call, Watch, noted, nothing
from campaign import Campaign
from disk import NAMES_KEPT, NOTHING_KEPT, Disk, NoDiskError, cut_power
from forks import forked
from judging import Truth, find_truth, judge, warm
from scenarios import SCENARIOS, Scenario, llama, plain_model, trainer_checkpoint

FLAGS = {NAMES_KEPT: "names kept, bytes lost", NOTHING_KEPT: "all lost"}
FEW = 3  # cases of each kind and scenario in a short run
LATER = 1.6  # seconds; names are written out every second in these cases

IN_SHORT = (
    "save into a new directory",
    "save shards over shards",
    "save shards over a .bin",
    "nested file over another",
    "nested folder over another",
    "convert into a new directory",
    "convert over shards",
    "save_pretrained over a .bin",
    "Trainer, one checkpoint is kept",
)


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        scenarios = peers() if campaign.peers else SCENARIOS
        for name, scenario in scenarios.items():
            if campaign.wanted(name) and (campaign.long or campaign.peers or name in IN_SHORT):
                try:
                    lose_power(campaign, scenario)
                except NoDiskError as error:
                    campaign.skip(name, error)
        return campaign.end()


def lose_power(campaign: Campaign, scenario: Scenario) -> None:
    """Cut the power at each moment, or at some."""
    warm(scenario, campaign.folder / "warm")
    with Disk(campaign.folder / "loss") as disk:
        prepare(scenario, disk)
        truth = find_truth(scenario, disk.top)
        disk.restore()
        calls: list[str] = forked(lambda: noted(lambda: scenario.act(disk.top), disk.top)).value
        moments = [(call, flag) for call in range(len(calls)) for flag in FLAGS]
        for call, flag in campaign.few(moments, 2 * FEW):
            disk.restore()
            ended = forked(lambda call=call, flag=flag: act(scenario, disk.top, call, flag))  # type: ignore[misc]
            label = f"{scenario.name}, before call {call} ({calls[call]}), {FLAGS[flag]}"
            look(campaign, scenario, disk, truth, label, ended.killed or str(ended))
        for flag in FLAGS:
            disk.restore()
            ended = forked(lambda flag=flag: act(scenario, disk.top, None, flag))  # type: ignore[misc]
            label = f"{scenario.name}, when it has returned, {FLAGS[flag]}"
            look(campaign, scenario, disk, truth, label, ended.killed or str(ended), must_be_new=True)
    if campaign.long or scenario.name in IN_SHORT[:2]:
        lose_power_later(campaign, scenario)


def lose_power_later(campaign: Campaign, scenario: Scenario) -> None:
    """Cut the power when the system has written out names, and not yet bytes, of its own accord."""
    with Disk(campaign.folder / "later", commit=1) as disk:
        prepare(scenario, disk)
        truth = find_truth(scenario, disk.top)
        disk.restore()
        ended = forked(lambda: act(scenario, disk.top, None, NOTHING_KEPT, LATER))
        label = f"{scenario.name}, {LATER} seconds after it has returned"
        look(campaign, scenario, disk, truth, label, ended.killed or str(ended), must_be_new=True)


def prepare(scenario: Scenario, disk: Disk) -> None:
    ended = forked(lambda: (scenario.prepare(disk.top), os.sync()))
    if ended.error:
        raise RuntimeError(f"'{scenario.name}' cannot be prepared: {ended}")
    disk.keep()


def act(scenario: Scenario, top: Path, at: int | None, flag: int, later: float = 0) -> None:
    """Run a scenario until the power is cut, and this process with it."""

    def cut() -> None:
        cut_power(str(top), flag)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_call(call: Call) -> None:
        if call.number == at:
            cut()

    with Watch(top, CHANGES, nothing if at is None else on_call):
        scenario.act(top)
    if at is None:
        time.sleep(later)
        cut()


def look(
    campaign: Campaign,
    scenario: Scenario,
    disk: Disk,
    truth: Truth,
    label: str,
    died: bool | str,
    *,
    must_be_new: bool = False,
) -> None:
    """Switch the power on again, and judge."""
    if died is not True:
        campaign.case(label, [f"the power was not cut: {died}"])
        return
    disk.remount()
    campaign.case(label, judge(scenario, disk.top, truth, must_be_new=must_be_new))


def peers() -> dict[str, Scenario]:
    """What plain libraries do in the same places, for comparison."""

    def plain_file(value: float, top: Path) -> None:
        from safetensors.torch import save_file

        save_file(dict(llama(value).state_dict()), top / "model.safetensors")

    def transformers_over(top: Path) -> None:
        plain_model(top / "out", 2.0, "sharded")

    single = SCENARIOS["save shards over one file"]
    trainer = SCENARIOS["Trainer, one checkpoint is kept"]
    plain_trainer: Callable[[int, Path], None] = functools.partial(trainer_checkpoint, streaming=False)
    made = (
        Scenario(
            "plain safetensors.save_file",
            functools.partial(plain_file, 1.0),
            functools.partial(plain_file, 2.0),
            out="model.safetensors",
        ),
        Scenario("plain save_pretrained", single.prepare, transformers_over, single.readers),
        Scenario(
            "plain Trainer, one checkpoint is kept",
            functools.partial(plain_trainer, 1),
            functools.partial(plain_trainer, 2),
            trainer.readers,
            many=True,
        ),
    )
    return {scenario.name: scenario for scenario in made}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
