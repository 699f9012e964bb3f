"""A campaign of random examples for the property tests, for 30 seconds, and whether such a campaign finds anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 30
RARE = """
from hypothesis import given, strategies as st

@given(st.integers(0, 5000))
def test_most_pass(number):
    assert number != {wrong}

@given(st.integers())
def test_all_pass(number):
    assert number == number

def test_without_chance():
    raise AssertionError
"""


def fuzz(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `scripts/fuzz`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, ROOT / "scripts" / "fuzz", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": path})


def test_nothing_is_found_in_half_a_minute(tmp_path: Path) -> None:
    ended = fuzz("--seconds", SECONDS, "--kept", tmp_path)
    found = [path.read_text() for path in tmp_path.iterdir()]
    assert (ended.returncode, found) == (0, []), ended.stdout + ended.stderr
    assert int(re.search(r"(\d+) runs of property tests, seed \d+: 0 failed", ended.stdout)[1]) > 0


def test_what_is_found_is_kept_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    tests, kept = tmp_path / "test_rare.py", tmp_path / "kept"
    tests.write_text(RARE.format(wrong=1234))

    found = fuzz("--seed", 3, "--seconds", 300, "--kept", kept, f"{tests}::test_most_pass")
    assert found.returncode == 1, found.stdout + found.stderr
    assert found.stdout.startswith("seed 3\n")
    (file,) = kept.iterdir()
    assert str(file) in found.stdout
    assert "number=1234" in file.read_text()

    again = fuzz("--seconds", 0, "--kept", kept, tests)
    assert (again.returncode, re.search(r"(\d+) runs", again.stdout)[1]) == (1, "1"), again.stdout + again.stderr
    assert list(kept.iterdir()) == [file]

    tests.write_text(RARE.format(wrong=-1))
    mended = fuzz("--seconds", 0, "--kept", kept, tests)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert "passes now" in mended.stdout
    assert list(kept.iterdir()) == []

    everything = fuzz("--seconds", 1, "--kept", kept, tests)
    assert everything.returncode == 0, everything.stdout + everything.stderr  # test_without_chance was not run


def test_a_campaign_without_tests_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("def test_without_chance():\n    raise AssertionError\n")
    assert fuzz("--kept", tmp_path / "kept", tmp_path).returncode == 2
    assert fuzz("--seconds", "many").returncode == 2
