"""Real files with damage: each is refused, or read as torch.load(weights_only=True) reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from file_facts import pwned
from torch_files import FOLDER, files, fuzz

_SHARE = 12


@pytest.mark.parametrize("first", range(0, 480, _SHARE))
def test_damaged_files_are_refused_or_read_as_torch_reads_them(tmp_path: Path, first: int) -> None:
    names = files("good", "unusual", "hostile")
    outcomes = [fuzz(FOLDER / names[n % len(names)], n, tmp_path / "x.pt") for n in range(first, first + _SHARE)]
    assert set(outcomes) <= {"refused", "equal"}
    assert not pwned()
