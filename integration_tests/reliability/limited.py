"""Many cases of a campaign in child processes with limits: one that dies, or takes too much, is counted and named."""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

# For each case, beyond what Python and torch have taken.
MEMORY = 1 << 30
SECONDS = 10
_SHARE = 2000
_TOP = Path(__file__).parents[2]


def campaign(module: str, argv: Sequence[str]) -> int:
    """Run `module.case(chance, number, folder)` for each number of a seed, and print what went wrong.

    Case `number` of a seed is always the same one.

    Args:
        module: The campaign.
        argv: `--seed N`, by default another one each time, and `--count N`.

    Returns:
        The exit status: 1 if anything went wrong.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args(argv)
    seed, count = options.seed, options.count
    print(f"{module}: seed {seed}, {count} cases", flush=True)
    wrong = at = 0
    while at < count:
        stop = min(at + _SHARE, count)
        with tempfile.TemporaryDirectory() as folder:
            child = subprocess.run(
                [sys.executable, __file__, module, str(seed), str(at), str(stop)],
                cwd=folder,
                capture_output=True,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(map(str, (_TOP, _TOP / "tests", Path(__file__).parent))),
                },
            )
        lines = child.stdout.splitlines()
        found = [line for line in lines if not line.isdigit()]
        wrong += sum(line.startswith("wrong") for line in found)
        print(*found, sep="\n", end="\n" if found else "", flush=True)
        if child.returncode == 0:
            at = stop
            continue
        at = 1 + max((int(line) for line in lines if line.isdigit()), default=at)
        wrong += 1
        print(f"wrong: the process ended at case {at - 1} with {child.returncode}: {child.stderr[-500:]}", flush=True)
    print(f"tried {count}, wrong {wrong}", flush=True)
    return 1 if wrong else 0


def within_limits(seconds: int = SECONDS) -> None:
    """Let this process take so much more CPU time, and `MEMORY`, than it has taken so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))
    with open("/proc/self/statm") as sizes:
        now = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))


def _child(module: str, seed: int, first: int, stop: int) -> None:
    case = __import__(module).case
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(first, stop):
        print(number, flush=True)
        within_limits()
        try:
            case(random.Random(f"{seed}.{number}"), number, Path())
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is counted)
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(f"wrong: seed {seed}, case {number}: {error!r:.400} at {place.filename}:{place.lineno}", flush=True)


if __name__ == "__main__":
    _child(sys.argv[1], *map(int, sys.argv[2:]))
