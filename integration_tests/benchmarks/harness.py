"""Runs contenders on one piece of work in turn, each time in a fresh process, and prints medians and ratios.

A script describes its cases and calls `main`. The driving process makes the seeded checkpoints and starts one worker
process per contender and turn (A B C A B C ...). A worker imports and prepares, does the work once on a checkpoint of a
few MB so that lazy imports are not counted, waits until the page cache is warm and its memory is being sampled, then
does the work once and reports. Times are of the work alone; memory is counted from just before it.

Checkpoints, 6 GB, are kept under `--data` for the next run; what the work wrote is removed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import checkpoints
import measure
import torch

Work = Callable[[], measure.Result]
# Given the checkpoint's directory and a path to write to (not there yet), returns the work.
Prepare = Callable[[Path, Path], Work]

WARM_UP_SCALE = 0.0005
MIB = 1 << 20


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Attributes:
        prepare: Everything that is not measured; returns the work that is.
        requires: A module without which the contender is left out.
        same_result: Whether `--check` expects of it what the others make.
    """

    prepare: Prepare
    requires: str | None = None
    same_result: bool = True


@dataclass(frozen=True)
class Case:
    """A piece of work and those who compete at it.

    Attributes:
        title: What is done, for the table's heading.
        checkpoint: Kind of the checkpoint, as `checkpoints.make` takes it.
        contenders: By name, in the order in which they take turns.
        peers: Contenders that the others are put in proportion to.
    """

    title: str
    checkpoint: str
    contenders: Mapping[str, Contender]
    peers: Sequence[str]


def main(cases: Mapping[str, Case]) -> None:
    """Run the command line of a benchmark script."""
    options = _parse(cases)
    if options.worker:
        case, contender = options.worker
        _work(cases[case], contender, options)
        return
    reports = [_compare(name, cases[name], options) for name in options.cases]
    machine = _machine()
    if options.json:
        print(json.dumps({"machine": machine, "options": _shown(options), "cases": reports}, indent=2))
        return
    print(f"`{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}` on {', '.join(machine.values())}")
    for report in reports:
        print(f"\n{_table(report)}")


def _parse(cases: Mapping[str, Case]) -> argparse.Namespace:
    default = Path(tempfile.gettempdir()) / "hf_stream-benchmarks"
    names = list(dict.fromkeys(name for case in cases.values() for name in case.contenders))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    parser.add_argument("--repeat", type=int, default=5, help="turns of each contender")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the checkpoints relative to the full ones")
    parser.add_argument("--data", type=Path, default=default, help="directory for checkpoints and results")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="count what the first call imports")
    parser.add_argument("--check", action="store_true", help="compare what the contenders made, byte for byte")
    parser.add_argument("--json", action="store_true", help="print every single run instead of tables")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "CONTENDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _compare(name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run all turns of a case and return its runs and medians."""
    source = checkpoints.make(case.checkpoint, options.scale, options.data)
    checkpoints.make(case.checkpoint, WARM_UP_SCALE, options.data)
    contenders = [
        contender
        for contender, about in case.contenders.items()
        if contender in options.contenders
        and (about.requires is None or importlib.util.find_spec(about.requires) is not None)
    ]
    runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    for turn in range(options.repeat):
        for contender in contenders:
            print(f"{name}: {contender}, turn {turn + 1} of {options.repeat}", file=sys.stderr)
            runs[contender].append(_start_worker(name, contender, source, options))

    if options.check:
        prints = {
            contender: sorted({run["fingerprint"] for run in runs[contender]})
            for contender in contenders
            if case.contenders[contender].same_result
        }
        if len({value for values in prints.values() for value in values}) != 1:
            raise SystemExit(f"{name}: contenders made different results: {prints}")
    medians = {
        contender: {key: statistics.median(run[key] for run in of_one) for key in of_one[0] if key != "fingerprint"}
        for contender, of_one in runs.items()
    }
    return {
        "case": name,
        "title": case.title,
        "peers": [peer for peer in case.peers if peer in contenders],
        "left_out": [contender for contender in case.contenders if contender not in contenders],
        "medians": medians,
        "runs": runs,
    }


def _warm_page_cache(directory: Path) -> None:
    for path in directory.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.read(8 * MIB):
                pass


def _start_worker(case: str, contender: str, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Let a fresh process do the work once and return what it reported and what was seen from outside."""
    os.sync()  # what the run before left to be written would slow this one down
    wanted = 3 * sum(path.stat().st_size for path in source.iterdir())
    reserve = measure.Reserve(min(wanted, measure.available_memory() // 2))
    command = [sys.executable, sys.argv[0], "--worker", case, contender, "--data", str(options.data)]
    command += ["--scale", str(options.scale)]
    command += ["--check"] * options.check + ["--no-warm-up"] * (not options.warm_up)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise SystemExit(f"{case}: {contender} failed while preparing, see above")
        _warm_page_cache(source)
        sampler = measure.PeakSampler(worker.pid)
        reserve.release()
        worker.stdin.write("go\n")
        worker.stdin.flush()
        if worker.stdout.readline() != "done\n":
            raise SystemExit(f"{case}: {contender} failed, see above")
        peak = sampler.stop()
        report: dict[str, Any] = json.loads(worker.stdout.read())
    start, destination = report.pop("start"), report.pop("destination")
    above = {kind: max(peak[kind], report["end"][kind]) - start[kind] for kind in peak}
    del report["end"]
    return {
        **report,
        "anon": above["RssAnon"],
        "anon_beyond_destination": above["RssAnon"] - destination,
        "file": above["RssFile"],
        "rss": above["VmRSS"],
    }


def _work(case: Case, contender: str, options: argparse.Namespace) -> None:
    """Be the worker: prepare, do the work when told to, report."""
    # The driver reads what is sent here; what libraries print goes to stderr.
    report_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    prepare = case.contenders[contender].prepare
    with tempfile.TemporaryDirectory(dir=options.data, prefix="result-") as scratch:
        if options.warm_up:
            small = checkpoints.make(case.checkpoint, WARM_UP_SCALE, options.data)
            target = Path(scratch) / "warm-up"
            prepare(small, target)()
            shutil.rmtree(target, ignore_errors=True)
        work = prepare(checkpoints.make(case.checkpoint, options.scale, options.data), Path(scratch) / "result")
        gc.collect()
        start = measure.read_memory()
        print("ready", file=report_to, flush=True)
        sys.stdin.readline()

        stopwatch = measure.Stopwatch()
        result = work()
        wall, cpu = stopwatch.read()

        end = measure.read_memory()
        print("done", file=report_to, flush=True)
        report = {"wall": wall, "cpu": cpu, "start": start, "end": end}
        report["destination"] = measure.anonymous_nbytes(result)
        if options.check:
            report["fingerprint"] = measure.fingerprint(result)
        print(json.dumps(report), file=report_to, flush=True)


def _table(report: dict[str, Any]) -> str:
    peers = report["peers"]
    header = ["", "wall s", "(min to max)", *(f"x {peer}" for peer in peers), "CPU s"]
    header += ["anon MiB", "beyond destination", "file MiB", "RSS MiB"]
    rows = []
    for contender, median in report["medians"].items():
        walls = [run["wall"] for run in report["runs"][contender]]
        ratios = [f"{median['wall'] / report['medians'][peer]['wall']:.2f}" for peer in peers]
        memory = [f"{median[key] / MIB:.0f}" for key in ("anon", "anon_beyond_destination", "file", "rss")]
        spread = f"{min(walls):.2f} to {max(walls):.2f}"
        rows.append([contender, f"{median['wall']:.2f}", spread, *ratios, f"{median['cpu']:.2f}", *memory])
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    text = f"**{report['title']}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text + (f"\n\nLeft out: {', '.join(report['left_out'])}." if report["left_out"] else "")


def _machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "python": f"Python {platform.python_version()}",
        "torch": f"torch {torch.__version__}",
        "transformers": f"transformers {version('transformers')}",
        "safetensors": f"safetensors {version('safetensors')}",
    }


def _shown(options: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(options, key) for key in ("repeat", "scale", "warm_up", "check")}
