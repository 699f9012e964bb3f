"""Thousands of damaged files of torch.save, in processes of their own: of one that crashes the number is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "tests"
FILES = 6000
SHARE = 1500

_PROGRAM = """
import logging, sys
from collections import Counter
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
from torch_files import FOLDER, PWNED, files, fuzz
logging.disable(logging.WARNING)
names = files("good", "unusual", "hostile")
outcomes = Counter()
for number in range({first}, {stop}):
    print(number, end=" ", flush=True)
    outcomes[fuzz(FOLDER / names[number % len(names)], number, Path("x.pt"))] += 1
assert not PWNED.exists()
assert set(outcomes) == {{"refused", "equal"}}, outcomes
assert outcomes["equal"] > ({stop} - {first}) // 20, outcomes
"""


@pytest.mark.parametrize("first", range(10_000, 10_000 + FILES, SHARE))
def test_damaged_files_are_refused_or_read_as_torch_reads_them(tmp_path: Path, first: int) -> None:
    program = _PROGRAM.format(tests=str(TESTS), root=str(TESTS.parent), first=first, stop=first + SHARE)
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"at file {run.stdout.split()[-1:]}, exit code {run.returncode}: {run.stderr}"
