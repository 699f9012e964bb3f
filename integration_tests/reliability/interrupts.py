"""Campaign: signals and exceptions come from outside and from progress callbacks, in every thread: nothing appears."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import trees
from campaign import Campaign
from forks import forked
from judging import fresh
from safetensors.torch import save_file

import hf_stream

FEW = 14  # cases of each kind in a short run
MIB = 1 << 20
NBYTES = 24 * MIB  # enough for several threads


class Strange(BaseException):
    """What no code expects."""


RAISED: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit, GeneratorExit, Strange, ValueError)


class Raises:
    """Raises in its n-th call, in the main thread or in another one, and from then on in no call."""

    def __init__(self, n: int, error: type[BaseException], in_main: bool) -> None:
        self.left, self.error, self.in_main = n, error, in_main
        self.raised = False

    def update(self, n: int) -> None:
        if (threading.current_thread() is threading.main_thread()) == self.in_main:
            self.left -= 1
            if not self.left:
                self.raised = True
                raise self.error("on purpose")
        time.sleep(0.001)  # the other threads come, too


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.full((NBYTES // 24,), value) for n in range(6)}


Act = Callable[[Path, object], object]

ACTS: dict[str, Act] = {
    "save": lambda top, progress: hf_stream.save_checkpoint(
        tensors(2), top / "out", max_shard_size=8 * MIB, buffer_size=4 * MIB, progress=progress
    ),
    "save_nested": lambda top, progress: hf_stream.save_nested(
        {"a": tensors(2)}, top / "out" / "s.safetensors", buffer_size=4 * MIB, progress=progress
    ),
    "convert": lambda top, progress: hf_stream.convert(
        top / "source", top / "out", max_shard_size=8 * MIB, buffer_size=4 * MIB, progress=progress
    ),
    "load": lambda top, progress: hf_stream.materialize(
        hf_stream.open_checkpoint(top / "source"), buffer_size=4 * MIB, progress=progress
    ),
}


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        template = campaign.folder / "template"
        (template / "source").mkdir(parents=True)
        save_file(tensors(1), template / "source" / "model.safetensors")
        (template / "out").mkdir()
        save_file({"x": torch.ones(3)}, template / "out" / "model.safetensors")
        top = campaign.folder / "top"
        cases = [
            (name, n, error, in_main)
            for name in ACTS
            for n in (1, 2, 3)
            for error in RAISED
            for in_main in (True, False)
        ]
        for name, n, error, in_main in campaign.few(cases, FEW):
            fresh(template, top)
            label = f"{name}: {error.__name__} in call {n} in {'the main' if in_main else 'another'} thread"
            _case(campaign, label, lambda: raise_in(top, ACTS[name], Raises(n, error, in_main)))  # noqa: B023
        for number in range(100 if campaign.long else FEW):
            name = campaign.random.choice(list(ACTS))
            delay = campaign.random.uniform(0, 0.08)
            fresh(template, top)
            label = f"{name}: SIGINT after {delay:.4f} seconds ({number})"
            _case(campaign, label, lambda: interrupt(top, ACTS[name], delay))  # noqa: B023
        return campaign.end()


def _case(campaign: Campaign, label: str, attempt: Callable[[], list[str]]) -> None:
    ended = forked(attempt, quiet=True)
    campaign.case(label, ended.value if ended.value is not None else [str(ended)])


def raise_in(top: Path, act: Act, progress: Raises) -> list[str]:
    before = trees.files(top / "out")
    try:
        act(top, progress)
    except BaseException as error:  # noqa: BLE001, that is what is tried
        got: BaseException | None = error
    else:
        got = None
    if not progress.raised:
        return []  # no other thread came to it
    wrong = [] if type(got) is progress.error else [f"{progress.error.__name__} was raised, and what came is {got!r}"]
    return wrong + _left(top, act, before)


def interrupt(top: Path, act: Act, delay: float) -> list[str]:
    """Have this process interrupted by a signal; the handler is Python's own."""
    before = trees.files(top / "out")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    done = False
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        act(top, False)
        done = True
        time.sleep(delay)  # if it has not come yet, it comes here
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    return _left(top, act, None if done else before)


def _left(top: Path, act: Act, before: trees.Tree | None) -> list[str]:
    """What is wrong about what is left; the next run must work."""
    wrong = []
    left = trees.files(top / "out")
    running = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if running:
        wrong.append(f"threads are left: {running}")
    act(top, False)
    after = trees.files(top / "out")
    if before is not None and left not in (before, after):
        wrong.append(f"something was published: {trees.difference(left, before)}")
    if any(name.endswith(".hf-stream") for name in os.listdir(top / "out")):
        wrong.append("a work directory is left")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
