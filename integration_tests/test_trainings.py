"""Trainings that are killed, and go on in another process; trainings of two processes; checkpoints on the Hub."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import HubServer
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

import hf_stream
from hf_stream.integrations.trainer.place import clear_leftovers

CHILDREN = str(Path(__file__).with_name("trainer_children.py"))
STATES = {"optimizer.safetensors", "scheduler.safetensors", "rng_state.safetensors"}
SMALL = {"config.json", "generation_config.json", "trainer_state.json", "training_args.bin"}


def run(
    directory: Path, *arguments: object, launcher: list[str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [*(launcher or [sys.executable]), CHILDREN, *map(str, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", **environment}
    return subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=600)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("checkpoint-*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_two_steps_a_kill_and_two_more_steps_are_four_steps(tmp_path: Path, processes: int) -> None:
    parallel = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher = parallel if processes == 2 else [sys.executable]
    left = []
    for name, turns in (("straight", [("0", "new")]), ("killed", [("2", "new"), ("0", "resume")])):
        (tmp_path / name).mkdir()
        for killed_after, resume in turns:
            ended = run(tmp_path / name, "train", "run", killed_after, resume, launcher=launcher)
            assert (ended.returncode == 0) == (killed_after == "0"), ended.stderr
        left.append(contents(tmp_path / name / "run" / "checkpoint-4"))
    straight, resumed = left
    generators = {1: set(), 2: {"rng_state_0.safetensors", "rng_state_1.safetensors"}}[processes]
    assert generators <= straight.keys()
    if processes == 2:  # they say which process they are of
        del straight["training_args.bin"], resumed["training_args.bin"]
    assert straight == resumed


def test_a_save_killed_at_any_change_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    said = run(tmp_path, "save_until_killed", tmp_path)
    assert said.returncode == 0, said.stderr
    count = int(said.stdout.splitlines()[-1])
    assert count > 20
    # Arguments name the directory, and generators begin anew in each process.
    unlike = dict.fromkeys(["rng_state.safetensors", "training_args.bin"], b"")

    def found_in(directory: Path) -> dict[str, dict[str, bytes]]:
        return {path.name: {**contents(path), **unlike} for path in checkpoints(directory)}

    whole = contents(tmp_path / "template" / "checkpoint-1").keys()
    template = found_in(tmp_path / "template")
    done = found_in(tmp_path / str(count))
    assert list(done) == ["checkpoint-2", "checkpoint-3"]
    assert done["checkpoint-3"] != template["checkpoint-3"]
    absent = 0
    for limit in range(count + 1):
        directory = tmp_path / str(limit)
        found = found_in(directory)
        assert all(contents(path).keys() == whole for path in checkpoints(directory))
        absent += "checkpoint-3" not in found
        assert found.get("checkpoint-3", template["checkpoint-3"]) in (
            template["checkpoint-3"],
            done["checkpoint-3"],
        )
        assert all(files == template[name] for name, files in found.items() if name != "checkpoint-3")
        clear_leftovers(str(directory))
        left = found_in(directory)
        assert len(left) == len(list(directory.iterdir()))
        assert left.keys() - {"checkpoint-1"} == {"checkpoint-2", "checkpoint-3"}
        assert left["checkpoint-3"] == found.get("checkpoint-3", done["checkpoint-3"])
        shutil.rmtree(directory)
    assert absent == 1  # between the two steps of a replacement


def test_a_training_killed_at_any_moment_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(0)
    command = [sys.executable, CHILDREN, "save_all_the_time", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    last = 0
    for turn in range(4):
        how = "resume" if turn else "new"
        with subprocess.Popen([*command, how], cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line == b"saved\n":
                    break
            time.sleep(rng.uniform(0, 0.3))
            child.kill()
        assert child.returncode == -9
        found = checkpoints(tmp_path / "run")
        assert 1 <= len(found) <= 4
        for path in found:
            files = {name for name in contents(path) if not name.startswith("model")}
            assert files == STATES | SMALL
            assert hf_stream.open_checkpoint(path).nbytes > 0
            assert all(tensor.isfinite().all() for file in path.glob("model-*") for tensor in load_file(file).values())
            assert isinstance(hf_stream.load_nested(path / "optimizer.safetensors")["state"], dict)
        newest = int(str(get_last_checkpoint(str(tmp_path / "run"))).rpartition("-")[2])
        assert newest > last
        last = newest


def test_checkpoints_are_pushed_as_they_are(hub: HubServer, tmp_path: Path) -> None:
    pushed = run(tmp_path, "push", "run", "tester/model", **hub.environment(tmp_path / "home"))
    assert pushed.returncode == 0, pushed.stderr
    files = hub.files("tester/model")
    for step in (2, 4):
        wanted = contents(tmp_path / "run" / f"checkpoint-{step}")
        assert {
            name.split("/")[1]: content for name, content in files.items() if name.startswith(f"checkpoint-{step}/")
        } == wanted
    assert {name.split("/")[0] for name in files if "/" in name} == {"checkpoint-2", "checkpoint-4"}
    index = hf_stream.open_checkpoint(tmp_path / "run")
    assert len(index.headers) > 1
    assert {"README.md", "hf_stream.json", *index.headers} <= files.keys()
