"""A test run is the same for everybody, whatever ran before, on whatever machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
CONFTEST = "from repeatable import pytest_collectstart, pytest_fixture_setup, pytest_runtest_call\n"
DRAWING = """
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

DRAWN = [("module", torch.rand(1).item())]

@pytest.fixture(scope="session")
def shared(): return torch.rand(1).item(), random.random(), np.random.rand()

@pytest.fixture(params=[1, 2])
def own(request): return torch.rand(1).item(), random.random(), np.random.rand()

def draw(tmp_path, name, *values):
    with open("drawn", "a") as file: file.write(f"{name} {DRAWN} {values}\\n")

def test_first(tmp_path, shared, own):
    draw(tmp_path, f"first {own}", shared, own, torch.rand(1).item())

def test_second(tmp_path, shared):
    draw(tmp_path, "second", shared, torch.rand(1).item())

@given(st.integers(), st.text(), st.sets(st.text()), st.randoms())
def test_third(number, text, texts, chance):
    draw(None, "third", number, text, sorted(texts), chance.random(), torch.rand(1).item())
"""
# What hypothesis would take for code of the project, and draw from.
LOCAL = "".join(f"NUMBER_{n} = {10**15 + n}\nTEXT_{n} = 'local text {n}'\n" for n in range(500))


def drawn(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """The lines that the tests above write, sorted: what each of them drew."""
    (folder / "drawn").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *arguments]
    path = os.pathsep.join([str(TESTS), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted((folder / "drawn").read_text().splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Not below a folder named tests or test_...: there hypothesis looks for no constants.
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_draws.py").write_text(DRAWING)
    (folder / "local.py").write_text(LOCAL)
    return folder


@pytest.fixture(scope="module")
def usual(folder: Path) -> list[str]:
    lines = drawn(folder, PYTHONHASHSEED="0")
    assert len(lines) > 100
    assert len({line.split("(", 1)[1] for line in lines}) > 100  # not the same number each time
    return lines


def test_it_depends_neither_on_hashes_nor_on_what_was_imported_nor_on_the_order(folder: Path, usual: list[str]) -> None:
    turned = (f"test_draws.py::test_{name}" for name in ("third", "second", "first"))
    assert drawn(folder, "-p", "local", *turned, PYTHONHASHSEED="1") == usual


def test_a_test_alone_draws_what_it_draws_among_others(folder: Path, usual: list[str]) -> None:
    assert drawn(folder, "test_draws.py::test_second") == [line for line in usual if line.startswith("second")]


def test_it_does_not_depend_on_earlier_runs(folder: Path, usual: list[str]) -> None:
    assert not list((folder / ".hypothesis").glob("examples"))
    assert settings().derandomize
    assert settings().database is None
    assert settings().deadline is None
