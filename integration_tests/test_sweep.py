"""Every model type of transformers, through plain transformers and through hf_stream: both give and write the same.

To try them all, and see the counts and every type that plain transformers itself does not build or reload with the
reason: `SWEEP=all pytest -s integration_tests/test_sweep.py` (15 minutes of CPU time). To try some types only:
`SWEEP="llama t5" pytest -s ...`. Otherwise every eighth type is tried, to keep all checks together short.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from architectures import model_types

pytestmark = pytest.mark.alone

WORKER = str(Path(__file__).with_name("sweeping.py"))
PROCESSES = 2
# Seconds for one model type before its process is given up.
PATIENCE = 120
# How many of the types built and reloaded when this was written; some need packages that not every machine has.
ENOUGH = 740
STEP = 1 if os.environ.get("SWEEP") == "all" else 8


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """How each model type fared; a process that dies or hangs costs only the type it was at."""
    folder = tmp_path_factory.mktemp("sweep")
    chosen = os.environ.get("SWEEP", "all")
    todo = iter(model_types()[::STEP] if chosen == "all" else chosen.split())
    lock, found = threading.Lock(), []

    def work() -> None:
        for outcome in _answers(todo, lock, folder):
            found.append(outcome)

    threads = [threading.Thread(target=work) for _ in range(PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.sort(key=lambda outcome: outcome["type"])
    _print(found)
    return found


def test_all_that_plain_transformers_builds_and_reloads_is_loaded_and_saved_identically(
    outcomes: list[dict[str, Any]],
) -> None:
    assert {outcome["type"]: outcome["differences"] for outcome in outcomes if outcome.get("differences")} == {}


def test_no_type_kills_or_hangs_a_process(outcomes: list[dict[str, Any]]) -> None:
    assert [outcome["type"] for outcome in outcomes if "died" in outcome] == []


def test_conversions_compute_nothing_and_read_no_more_than_a_slice_needs(outcomes: list[dict[str, Any]]) -> None:
    assert {outcome["type"]: outcome["wasted"] for outcome in outcomes if outcome.get("wasted")} == {}


@pytest.mark.skipif(os.environ.get("SWEEP", "all") != "all", reason="only some types are tried")
def test_nearly_all_types_are_built_and_reloaded(outcomes: list[dict[str, Any]]) -> None:
    # Of every eighth, a little fewer than an eighth may be built.
    assert len(_reloaded(outcomes)) >= ENOUGH // STEP - (STEP > 1) * 10
    assert sum(outcome.get("converts", False) for outcome in outcomes) >= 80 // STEP - (STEP > 1) * 10


def _answers(todo: Iterator[str], lock: threading.Lock, folder: Path) -> Iterator[dict[str, Any]]:
    worker: subprocess.Popen[str] | None = None
    try:
        while True:
            with lock:
                model_type = next(todo, None)
            if model_type is None:
                return
            if worker is None:
                worker = subprocess.Popen(
                    [sys.executable, WORKER, str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(f"{model_type}\n")
            worker.stdin.flush()
            ready, _, _ = select.select([worker.stdout], [], [], PATIENCE)
            line = worker.stdout.readline() if ready else ""
            if line:
                yield json.loads(line)
            else:
                yield {"type": model_type, "died": "hung" if not ready else f"ended with {worker.wait()}"}
                _end(worker)
                worker = None
    finally:
        if worker is not None:
            _end(worker)


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.communicate()


def _reloaded(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [outcome for outcome in outcomes if "differences" in outcome and "unusable" not in outcome]


def _print(outcomes: list[dict[str, Any]]) -> None:
    reloaded = _reloaded(outcomes)
    for kind in ("load", "save"):
        same = [o for o in reloaded if not any(words.startswith((kind, "hf_stream")) for words in o["differences"])]
        print(f"{kind} identical: {len(same)} of {len(reloaded)}")
    built = sum("left_out" not in outcome for outcome in outcomes)
    convert = sum(outcome.get("converts", False) for outcome in reloaded)
    print(f"{len(outcomes)} model types, {built} built, {len(reloaded)} reload, {convert} of them with converters")
    for outcome in outcomes:
        for key in ("left_out", "unusable", "died", "differences", "wasted"):
            if outcome.get(key):
                print(f"{outcome['type']}: {key}: {' '.join(str(outcome[key]).split())}")
