"""Runs all campaigns, two at a time, and prints what came of them.

    python integration_tests/reliability/run.py --long --seed 3

A campaign is a module here with a `main(argv)` that prints `tried N, wrong W` last; `CAMPAIGNS` says with which
arguments it is short, and with which it is long.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).parent
JOBS = 2


@dataclass(frozen=True)
class Arguments:
    """What a campaign is called with, beside `--seed N`."""

    short: tuple[str, ...] = ()
    long: tuple[str, ...] = ("--long",)


# Those that take longest come first.
CAMPAIGNS = {
    "power_loss": Arguments(),
    "kills": Arguments(),
    "failures": Arguments(),
    "full_disk": Arguments(),
    "hostile": Arguments(),
    "random_kills": Arguments(),
    "read_faults": Arguments(),
    "stale": Arguments(),
    "limits": Arguments(),
    "interrupts": Arguments(),
    "concurrency": Arguments(),
    "fuzz_pickles": Arguments(("--count", "400"), ("--count", "20000")),
    "fuzz_safetensors": Arguments(("--count", "400"), ("--count", "20000")),
    "bombs": Arguments(("--count", "16"), ("--count", "200")),
}


@dataclass
class Result:
    """What came of a campaign; `tried` is None where it did not come to its end."""

    name: str
    tried: int | None
    wrong: int
    seconds: float
    said: str


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="campaign", help=f"some of {', '.join(CAMPAIGNS)}; all by default")
    parser.add_argument("--long", action="store_true", help="try all cases, not only a few")
    parser.add_argument("--seed", type=int, default=0, help="chooses the cases; 0 unless told")
    told = parser.parse_args(argv)
    for name in set(told.names) - CAMPAIGNS.keys():
        parser.error(f"no campaign is called {name}")
    results = run(told.names or list(CAMPAIGNS), told.long, told.seed)
    for result in results:
        if result.wrong or result.tried is None:
            print(f"== {result.name}\n{result.said}")
    print(f"\nseed {told.seed}\n\n{table(results)}")
    return 1 if any(result.wrong or result.tried is None for result in results) else 0


def run(names: Sequence[str], long: bool, seed: int) -> list[Result]:
    """Run campaigns in processes of their own, which begin with everything imported."""
    import campaign  # noqa: F401, it sets the environment
    import transformers  # noqa: F401

    import hf_stream  # noqa: F401

    chosen = {name: CAMPAIGNS[name].long if long else CAMPAIGNS[name].short for name in names}
    waiting = [(name, [*arguments, "--seed", str(seed)]) for name, arguments in chosen.items()]
    running: dict[int, tuple[str, float, TextIO]] = {}
    found: dict[str, Result] = {}
    while waiting or running:
        while waiting and len(running) < JOBS:
            name, arguments = waiting.pop(0)
            said = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed when the process has ended
            running[_start(name, arguments, said)] = (name, time.monotonic(), said)
        pid, _ = os.wait()
        if pid in running:
            name, began, said = running.pop(pid)
            with said:
                said.seek(0)
                found[name] = _result(name, said.read(), time.monotonic() - began)
            print(f"{name} ended after {found[name].seconds:.0f} seconds", file=sys.stderr)
    return [found[name] for name in names]


def table(results: Sequence[Result]) -> str:
    rows = ["| campaign | tried | wrong |", "| --- | ---: | ---: |"]
    for result in results:
        tried, wrong = (result.tried, result.wrong) if result.tried is not None else ("did not end", "?")
        rows.append(f"| {result.name} | {tried} | {wrong} |")
    return "\n".join(rows)


def _start(name: str, arguments: list[str], said: TextIO) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        code = importlib.import_module(name).main(arguments)
    except BaseException:  # noqa: BLE001, the parent tells it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _result(name: str, said: str, seconds: float) -> Result:
    last = re.findall(r"^tried (\d+), wrong (\d+)$", said, re.MULTILINE)
    if not last:
        return Result(name, None, 0, seconds, said)
    tried, wrong = map(int, last[-1])
    return Result(name, tried, wrong, seconds, said)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main(sys.argv[1:]))
