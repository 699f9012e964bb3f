"""Every campaign in its short form; `run.py --long --seed N` beside this file tries all cases."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

RUN = Path(__file__).with_name("run.py")
NAMES = re.findall(r'^    "(\w+)": Arguments', RUN.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> str:
    """What the runner says of all campaigns, of which two run at a time."""
    ended = subprocess.run([sys.executable, str(RUN)], capture_output=True, text=True, timeout=1800)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong_in_a_campaign(said: str, name: str) -> None:
    (row,) = re.findall(rf"^\| {name} \| (.*) \| (.*) \|$", said, re.MULTILINE)
    tried, wrong = row
    assert (int(tried) > 0, int(wrong)) == (True, 0), said
