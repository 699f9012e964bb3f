from __future__ import annotations

import json
import os
import pty
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import llama, process, run
from safetensors import safe_open
from safetensors.torch import save_file

import hf_stream
from hf_stream.cli import main


def test_inspect_lists_what_safetensors_finds(source: Path) -> None:
    result = run("inspect", source, "--json")

    found = json.loads(result.stdout)
    with safe_open(source / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        wanted = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
        assert found["metadata"] == file.metadata()
    assert {entry["name"]: (entry["dtype"], entry["shape"]) for entry in found["tensors"]} == wanted
    assert {entry["file"] for entry in found["tensors"]} == {"model.safetensors"}
    assert sum(entry["nbytes"] for entry in found["tensors"]) == found["nbytes"]
    assert [file["nbytes"] for file in found["files"]] == [(source / "model.safetensors").stat().st_size]
    assert (result.exit_code, result.stderr) == (0, "")


def test_inspect_prints_a_table_and_totals(source: Path) -> None:
    lines = run("inspect", source, "--full").stdout.splitlines()

    assert lines[0].split() == ["name", "dtype", "shape", "bytes", "file"]
    assert lines[1].startswith("model.embed_tokens.weight")
    assert lines[1].split()[1:] == ["F32", "[32,", "16]", "2.05", "KB", "model.safetensors"]
    assert len(lines) == 1 + len(llama()) + 1
    assert lines[-1] == "8 tensors in 1 file: 1,552 elements, 6.21 KB"


def test_inspect_collapses_layers(source: Path) -> None:
    lines = [line.split() for line in run("inspect", source).stdout.splitlines()]

    assert lines[:2] == [
        ["name", "tensors", "dtype", "shape", "bytes", "file"],
        ["model.embed_tokens.weight", "1", "F32", "[32,", "16]", "2.05", "KB", "model.safetensors"],
    ]
    assert [line[:2] for line in lines[2:-1]] == [
        ["model.layers.{0..1}.self_attn.k_proj.weight", "2"],
        ["model.layers.{0..1}.self_attn.q_proj.weight", "2"],
        ["model.layers.{0..1}.self_attn.v_proj.weight", "2"],
        ["norm.weight", "1"],
    ]
    assert lines[3][2:] == ["F32", "[16,", "16]", "2.05", "KB", "model.safetensors"]


def test_inspect_fits_the_terminal(source: Path) -> None:
    def lines(*options: str) -> list[str]:
        master, slave = pty.openpty()
        with open(master, "rb", closefd=False) as terminal:
            result = process("inspect", source, *options, stdout=slave, COLUMNS="70")
            os.close(slave)
            assert result.returncode == 0
            shown = terminal.read1(1 << 16).decode()
        os.close(master)
        return shown.splitlines()

    fitted = lines()
    assert max(map(len, fitted)) == 70
    assert fitted[0].split() == ["name", "tensors", "dtype", "shape", "bytes"]
    assert fitted[2].startswith("...")
    assert ".self_attn.k_proj.weight  " in fitted[2]
    assert len(max(lines("--full"), key=len)) > 70
    assert "..." not in run("inspect", source).stdout


def test_a_checkpoint_in_a_notebook_is_the_same_table(source: Path) -> None:
    html = hf_stream.open_checkpoint(source)._repr_html_()
    for cell in ("model.layers.{0..1}.self_attn.q_proj.weight", "[16, 16]", "8 tensors in 1 file"):
        assert cell in html


def test_inspect_reads_nothing_but_headers(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [10**6, 5 * 10**4], "data_offsets": [0, 10**11]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 10**11)

    assert "100 GB" in run("inspect", tmp_path).stdout
    assert json.loads(run("plan", tmp_path, "--json").stdout)["nbytes_read"] == 10**11


def test_names_cannot_play_tricks_on_the_terminal(tmp_path: Path) -> None:
    odd = "a\x1b[2J\n\u202eb\tc"
    save_file({odd: torch.zeros(1), "plain": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({odd: torch.ones(1)}, tmp_path / "b.safetensors")

    shown = run("inspect", tmp_path / "a.safetensors").stdout
    assert r"a\x1b[2J\n\u202eb\tc" in shown
    assert len(shown.splitlines()) == 4
    names = [
        entry["name"] for entry in json.loads(run("inspect", tmp_path / "a.safetensors", "--json").stdout)["tensors"]
    ]
    assert sorted(names) == [odd, "plain"]
    differences = run("verify", tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout.splitlines()
    assert len(differences) == 2
    assert all(map(str.isprintable, differences))
    mistake = run("convert", tmp_path / "a.safetensors", tmp_path / "out", "--layout", "no\x1b[2Jname").stderr
    assert r"'no\x1b[2Jname' is not known" in mistake


def test_inspect_says_what_a_nested_state_is_made_of(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(14)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for weight in weights:
        weight.grad = torch.ones(2, 3)
    optimizer.step()
    rng = (10**5000, np.arange(3))
    state = {"optimizer": optimizer.state_dict(), "rng": rng, "note": "a\x1b" + "b" * 80, "\n": 1}
    hf_stream.save_nested(state, tmp_path / "state.safetensors")

    result = run("inspect", tmp_path / "state.safetensors")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[0] == "name"
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["rng/1", "1"],
        ["optimizer/state/{0..13}/momentum_buffer", "14"],
    ]
    assert lines[3:] == [
        "15 tensors in 1 file: 87 elements, 360 B",
        "nested state: dict of 4",
        "  optimizer: dict of 2",
        "    state: dict of 14",
        "    param_groups: list of 1",
        "  rng: tuple of 2",
        "    0: a large int",
        "    1: numpy array of shape [3]",
        "  note: 'a\\x1b" + "b" * 51 + "...",
        '  "\\n": 1',
    ]
    hf_stream.save_nested(list(range(20)), tmp_path / "list")
    assert run("inspect", tmp_path / "list").stdout.splitlines()[-1] == "  ... and 8 more"
    assert "nested" not in json.loads(run("inspect", tmp_path / "list", "--json").stdout)


def test_plan_is_what_convert_then_does(source: Path, tmp_path: Path) -> None:
    options = ("--layout", "packed-qkv", "--dtype", "bf16", "--max-shard-size", "1200")
    before = sorted(tmp_path.rglob("*"))
    plan = json.loads(run("plan", source, *options, "--json").stdout)
    assert sorted(tmp_path.rglob("*")) == before

    assert run("convert", source, tmp_path / "out", *options).exit_code == 0
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    written = {str(file.relative_to(tmp_path / "out")): file.stat().st_size for file in files}
    carried = {entry["file"]: entry["nbytes"] for entry in plan["carry"]}
    assert carried == {name: (source / name).stat().st_size for name in ("config.json", "more/tokenizer.json")}
    planned = {entry["file"]: entry["nbytes"] for entry in plan["write"]}
    assert len(planned) == 4
    assert planned == {name: nbytes for name, nbytes in written.items() if name not in carried}
    assert plan["nbytes_written"] == sum(planned.values())
    for entry in plan["write"]:
        if entry["tensors"]:
            with safe_open(tmp_path / "out" / entry["file"], "pt") as file:
                assert {tensor["name"]: tensor["shape"] for tensor in entry["tensors"]} == {
                    name: list(file.get_slice(name).get_shape())
                    for name in file.keys()  # noqa: SIM118
                }


def test_plan_counts_only_the_bytes_that_the_layout_needs(source: Path, layout_file: Path) -> None:
    plan = json.loads(run("plan", source, "-l", f"{layout_file}:half", "--json").stdout)

    assert plan["read"] == [{"file": str(source / "model.safetensors"), "nbytes": 1552 * 4 // 2}]
    assert plan["nbytes_read"] == 1552 * 4 // 2
    # The buffer, and nothing for views.
    assert plan["peak_nbytes"] == 64 << 20


def test_plan_counts_what_each_rule_takes(source: Path, layout_file: Path) -> None:
    options = ("-l", "packed-qkv", "-l", f"{layout_file}:two")
    result = run("plan", source, *options)
    head, pack, two, *_ = result.stdout.splitlines()
    assert head.split() == ["rule", "tensors"]
    assert (pack.split()[0], pack.split()[-1]) == ("packed-qkv:", "6")
    assert two.split()[-1] == "0"
    assert (result.exit_code, "found nothing among the 8 tensors" in result.stderr) == (2, True)
    result = run("plan", source, *options, "--allow-unmatched", "--json")
    assert result.exit_code == 0
    assert [entry["tensors"] for entry in json.loads(result.stdout)["rules"]] == [6, 0]


OPTIONS = [
    (),
    ("--layout", "packed-qkv", "--dtype", "bf16", "--max-shard-size", "1200"),
    ("--include", "*.layers.*", "--exclude", "*.1.*", "--json"),
    ("--verify", "--no-resume", "--no-durable", "--quiet", "--threads", "3", "--buffer-size", "1MB"),
    ("--format", "torchscript", "--json"),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_dry_run_is_the_plan_and_writes_nothing(options: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    plan = run("plan", source, tmp_path / "out", *options)
    dry = run("convert", source, tmp_path / "out", *options, "--dry-run")

    assert (plan.exit_code, plan.stderr) == (0, "")
    assert (dry.exit_code, dry.stdout, dry.stderr) == (0, plan.stdout, "")
    assert run("plan", source, *options).stdout == plan.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_takes_the_whole_command_line_of_convert() -> None:
    convert, plan = (
        {option for param in main.commands[name].params for option in param.opts} for name in ("convert", "plan")
    )
    assert plan == convert - {"--dry-run"}


def test_plan_refuses_what_convert_refuses(source: Path, tmp_path: Path) -> None:
    assert "is where the source is" in run("plan", source, source).stderr
    assert "no tensors are left" in run("plan", source, tmp_path / "out", "--exclude", "*").stderr
    result = run("convert", source, tmp_path / "out", "--json")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (2, "error: --json is for --dry-run.")


def test_the_buffer_counts_as_memory(source: Path) -> None:
    assert json.loads(run("plan", source, "--buffer-size", "1MB", "--json").stdout)["peak_nbytes"] == 1_000_000


def test_a_plan_in_python_prints_the_same_table(source: Path) -> None:
    plan = hf_stream.plan_conversion(source, max_shard_size="4KB")

    assert f"{plan}\n" == run("plan", source, "--max-shard-size", "4KB").stdout
    assert repr(plan) == f"Conversion('{source}', tensors=8, files=2, nbytes={plan.files.nbytes})"
    for cell in ("model-00001-of-00002.safetensors", "config.json", "needs at most 67.1 MB of memory"):
        assert cell in plan._repr_html_()


def test_plan_prints_a_table(source: Path) -> None:
    lines = run("plan", source, "--max-shard-size", "4KB").stdout.splitlines()

    assert [line.split()[:2] for line in lines[:-1]] == [
        ["what", "file"],
        ["read", "model.safetensors"],
        ["write", "model-00001-of-00002.safetensors"],
        ["write", "model-00002-of-00002.safetensors"],
        ["write", "model.safetensors.index.json"],
        ["carry", "config.json"],
        ["carry", "more/tokenizer.json"],
    ]
    assert re.fullmatch(r"reads 6.21 KB, writes 8 tensors in .* KB, needs at most 67.1 MB of memory", lines[-1])
