"""The benchmark scripts run on checkpoints of a few MB, and all contenders of a case make the same tensors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
OURS = {"hf_stream", "hf_stream, durable=False"}
COPIES = {"cp", "cp, sync"}
CONVERTERS = {*OURS, *COPIES, "load-cat-save"} | ({"d9d"} if importlib.util.find_spec("d9d") else set())


def run_benchmark(script: str, data: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), "--data", str(data), "--scale", "0.001", "--repeat", "1"]
    command += ["--check", "--json", *arguments]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    report: dict[str, Any] = json.loads(run.stdout)
    return report


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


@pytest.mark.parametrize(
    ("script", "arguments", "cases", "contenders"),
    [
        (
            "load.py",
            [
                "--contenders",
                "transformers",
                "hf_stream",
                "preadv",
                "--cases",
                "experts",
                "plain",
                "cast",
                "cast-experts",
            ],
            ["experts", "plain", "cast", "cast-experts"],
            {"transformers", "hf_stream", "preadv"},
        ),
        ("load.py", ["--cases", "int8", "offload"], ["int8", "offload"], {"transformers", "hf_stream"}),
        ("save.py", ["--cases", "experts", "plain"], ["experts", "plain"], {"transformers", *OURS, *COPIES}),
        ("save.py", ["--cases", "offloaded"], ["offloaded"], {"transformers", "hf_stream"}),
        ("train.py", [], ["checkpoint"], {"transformers", "hf_stream"}),
        ("convert.py", [], ["packed-qkv"], CONVERTERS),
        ("swift_transformer.py", [], ["opt"], {"hf_stream", "hf_stream, verify", "cp"}),
    ],
)
def test_contenders_agree_on_a_small_checkpoint(
    data: Path, script: str, arguments: list[str], cases: list[str], contenders: set[str]
) -> None:
    report = run_benchmark(script, data, *arguments)

    assert [case["case"] for case in report["cases"]] == cases
    for case in report["cases"]:
        assert set(case["medians"]) == contenders
        for median in case["medians"].values():
            assert median["wall"] > 0
            assert median["rss"] >= 0
    assert not list(data.glob("result-*")), "a run left its result behind"


def test_check_refuses_contenders_that_differ(data: Path) -> None:
    script = data / "differ.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import harness, torch
from harness import Case, Contender

def filled(value):
    return Contender(lambda source, target: lambda: {{"weight": torch.full((4,), value)}})

harness.main({{"case": Case("Differ", "llama", {{"one": filled(1.0), "two": filled(2.0)}}, ["one"])}})
"""
    )
    command = [sys.executable, str(script), "--data", str(data), "--scale", "0.001", "--repeat", "1", "--check"]

    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)

    assert run.returncode == 1
    assert "case: contenders made different results" in run.stderr
