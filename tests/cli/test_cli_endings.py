from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import llama, process, run
from safetensors.torch import save_file

import hf_stream

ROOT = Path(__file__).parents[2]


def test_layouts_are_listed_with_what_they_make() -> None:
    lines = run("layouts").stdout.splitlines()

    assert lines[0].split()[0] == "name"
    assert {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]} == hf_stream.layouts.names()


def test_help_and_version() -> None:
    assert run("--version").stdout == f"hf-stream {hf_stream.__version__}\n"
    shown = run("--help")
    assert (shown.exit_code, shown.stderr) == (0, "")
    for command in ("inspect", "plan", "convert", "verify", "layouts", "clean"):
        assert command in shown.stdout
        assert run(command, "-h").exit_code == 0
    assert "Exit codes: 0 done; 1 verify found a difference; 2 an error" in " ".join(shown.stdout.split())


def test_the_package_runs_as_a_module() -> None:
    shown = process("--version")
    assert (shown.returncode, shown.stdout) == (0, f"hf-stream {hf_stream.__version__}\n".encode())


COMMANDS: dict[str, tuple[str, list[str]]] = {
    "inspect": ("open_repository", ["{source}"]),
    "plan": ("plan_conversion", ["{source}"]),
    "convert": ("run_conversion", ["{source}", "{tmp}/out"]),
    "verify": ("verify", ["{source}", "{source}"]),
    "clean": ("clean", ["{tmp}"]),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", [[], ["--debug"]])
def test_what_nobody_expects_is_one_line_and_exit_code_2(
    command: str, flag: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyError("first line\nsecond")

    function, args = COMMANDS[command]
    monkeypatch.setattr(hf_stream.checkpoint, function, crash)
    result = run(command, *(arg.format(source=source, tmp=tmp_path) for arg in args), *flag)

    *trace, last = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert last.startswith(r"error: KeyError: 'first line\nsecond' (unexpected: ")
    assert "`hf-stream env`" in last
    assert bool(trace) == bool(flag)
    assert not trace or (trace[0] == "Traceback (most recent call last):" and "in crash" in result.stderr)


@pytest.mark.parametrize("args", [["--debug", "inspect", "{tmp}/nowhere"], ["inspect", "{tmp}/nowhere", "--debug"]])
def test_debug_shows_where_an_error_comes_from(args: list[str], tmp_path: Path) -> None:
    result = run(*(arg.format(tmp=tmp_path) for arg in args))

    lines = result.stderr.splitlines()
    assert result.exit_code == 2
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("error: '")
    assert "nowhere' does not exist" in lines[-1]


def test_mistakes_before_the_command_are_errors_like_others() -> None:
    result = run("--nothing")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[0] == "error: No such option '--nothing'."
    assert run().exit_code == 2


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no source": (["inspect", "{tmp}/nowhere"], "nowhere' does not exist"),
    "no checkpoint": (["inspect", "{tmp}"], "holds no .safetensors file"),
    "not a checkpoint": (["inspect", "{tmp}/mine.py"], "is neither a directory nor"),
    "no argument": (["convert", "{source}"], "Missing argument 'DST'"),
    "no such command": (["transmute"], "No such command 'transmute'"),
    "no such option": (["inspect", "{source}", "--yaml"], "No such option '--yaml'"),
    "type": (["plan", "{source}", "--dtype", "int8"], "'int8' is not a floating-point type; known are"),
    "size": (["plan", "{source}", "--max-shard-size", "5 parsecs"], "unit 'parsecs' is not one of KB, MB, GB, TB"),
    "size of nothing": (["plan", "{source}", "--max-shard-size", "0"], "size '0' leaves no room"),
    "size for a file": (["convert", "{source}", "{tmp}/o.safetensors", "--max-shard-size", "5GB"], "give a directory"),
    "layout": (["plan", "{source}", "-l", "packed-qv"], "Did you mean 'packed-qkv'?"),
    "layout without sizes": (["plan", "{bare}", "-l", "packed-qkv-per-head"], "There is no config.json beside"),
    "layout and wrong sizes": (["plan", "{source}", "-l", "packed-qkv-per-head"], "style 'per_head' needs as many"),
    "config that is not JSON": (["plan", "{broken}", "-l", "packed-qkv"], "config.json' is not JSON"),
    "no layout file": (["plan", "{source}", "-l", "{tmp}/other.py:x"], "other.py' is not a file"),
    "no name in the file": (["plan", "{source}", "-l", "{tmp}/mine.py"], "not written as path/to/file.py:name"),
    "other name in the file": (["plan", "{source}", "-l", "{tmp}/mine.py:three"], "has no 'three'. It has: "),
    "layout fails": (["plan", "{source}", "-l", "{tmp}/mine.py:fails"], "has no tensor 'lm_head'"),
    "config fails": (["plan", "{source}", "-l", "{tmp}/mine.py:from_config"], "line 20: KeyError: 'no such size'"),
    "layout ends the program": (["plan", "{source}", "-l", "{tmp}/mine.py:ends"], "line 23: SystemExit: 0"),
    "file ends the program": (["plan", "{source}", "-l", "{tmp}/quits.py:x"], "quits.py' failed: SystemExit: 0"),
    "no mapping": (["plan", "{source}", "-l", "{tmp}/mine.py:gives_list"], "must return a mapping of names to tensors"),
    "no tensors": (
        ["plan", "{source}", "-l", "{tmp}/mine.py:gives_shapes"],
        "must return names and tensors, got 'model.embed_tokens.weight': Size",
    ),
    "no inverse": (["plan", "{source}", "-l", "{tmp}/mine.py:half", "--inverse"], "is a function and has no inverse"),
    "inverse of nothing": (["plan", "{source}", "--inverse"], "give --layout as well"),
    "no directory": (["convert", "{source}", "{tmp}/mine.py/out"], "mine.py"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_clean_line_and_exit_code_2(
    mistake: str, source: Path, layout_file: Path, tmp_path: Path
) -> None:
    bare, broken = tmp_path / "bare", tmp_path / "broken"
    for directory in (bare, broken):
        directory.mkdir()
        save_file(llama(), directory / "model.safetensors")
    (broken / "config.json").write_text("{")
    (tmp_path / "quits.py").write_text("raise SystemExit(0)")
    before = sorted(tmp_path.rglob("*"))
    args, message = MISTAKES[mistake]

    result = run(*(arg.format(source=source, tmp=tmp_path, bare=bare, broken=broken) for arg in args))

    first, *rest = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert first.startswith("error: ")
    assert message in first
    assert not rest or re.fullmatch(r"see '.* --help'", *rest)
    assert sorted(tmp_path.rglob("*")) == before


def test_errors_of_the_system_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")

    result = run("inspect", tmp_path / "model.safetensors")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: '")


def test_warnings_of_the_library_are_shown(source: Path) -> None:
    weight_map = dict.fromkeys(list(llama())[1:], "model.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (source / "model.safetensors").rename(source / "weights.safetensors")
    index["weight_map"] = dict.fromkeys(weight_map, "weights.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))

    result = run("inspect", source)

    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert "model.embed_tokens.weight" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_reader_that_went_away_gets_no_traceback(source: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = process("inspect", source, stdout=writer)
    finally:
        os.close(writer)

    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_full_disk_under_stdout_is_an_error(source: Path) -> None:
    with open("/dev/full", "wb") as full:
        result = process("inspect", source, stdout=full)

    assert (result.returncode, result.stderr) == (2, b"error: No space left on device\n")


def test_ctrl_c_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    stops = tmp_path / "stops.py"
    stops.write_text("import os, signal\n\ndef layout(tensors):\n    os.kill(os.getpid(), signal.SIGINT)\n")

    result = process("convert", source, tmp_path / "out", "-l", f"{stops}:layout")

    assert (result.returncode, result.stderr) == (128 + signal.SIGINT, b"\ninterrupted\n")
    assert not (tmp_path / "out").exists()


CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


@pytest.mark.parametrize(
    ("module", "content"),
    [
        ("click", CTRL_C),
        ("torch", CTRL_C),
        # What pybind11 does with an exception in a module's initialisation.
        ("torch", "raise ImportError('initialization failed') from KeyboardInterrupt()\n"),
    ],
)
def test_ctrl_c_while_modules_are_imported(module: str, content: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / f"{module}.py").write_text(content)

    result = process("verify", source, source, PYTHONPATH=f"{tmp_path / 'first'}:{ROOT}")

    assert (result.returncode, result.stdout, result.stderr) == (128 + signal.SIGINT, b"", b"\ninterrupted\n")


def test_paths_and_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    save_file({"\u03b1": torch.zeros(2)}, tmp_path / "a.safetensors")
    destination = os.fsencode(tmp_path) + b"/out-\xff"

    shown = process("inspect", tmp_path / "a.safetensors", PYTHONIOENCODING="latin-1")
    converted = process("convert", tmp_path / "a.safetensors", destination, PYTHONIOENCODING="latin-1")

    assert shown.stdout.splitlines()[1].startswith(rb"\u03b1 ")
    assert (converted.returncode, converted.stdout) == (0, destination + b"\n")


@pytest.mark.parametrize("args", [["--help"], ["convert", "--help"], ["--version"], ["nonsense"]])
def test_help_does_not_wait_for_torch(args: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    result = process(*args, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert b"imported" not in result.stderr


def test_the_command_starts_without_transformers(source: Path) -> None:
    program = (
        "import sys\nfrom hf_stream.cli import main\n"
        "main(['plan', sys.argv[1], '-l', 'packed-qkv'], standalone_mode=False)\n"
        "assert not {'transformers', 'huggingface_hub.hf_api', 'httpx2'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program, source], check=True, stdout=subprocess.DEVNULL, timeout=120)
