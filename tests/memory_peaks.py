"""Anonymous memory of a process: what it has now, and how far some work takes it, measured in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def anonymous() -> int:
    """Bytes of anonymous memory that this process has in use."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes of anonymous memory above start at the worst moment of some work, its result included."""
    done = threading.Event()
    before = peak = anonymous()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    result = work()
    done.set()
    sampler.join()
    peak = max(peak, anonymous())
    del result
    return peak - before


def in_fresh_process(code: str, *arguments: object, **environment: str) -> str:
    """Run Python code, which may import this module, and give what it prints."""
    tests = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", code, *map(str, arguments)]
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": path, **environment}
    )
    assert child.returncode == 0, child.stderr
    return child.stdout
