from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from trainings import llama, trainer
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from hf_stream import CheckpointError, HfStreamError
from hf_stream.checkpoint import clean
from hf_stream.checkpoint.work import WorkDirectory
from hf_stream.integrations.trainer import StreamingCheckpointCallback, hooks, place
from hf_stream.integrations.trainer.methods import METHODS


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def checkpoint(directory: Path, step: int, text: str = "") -> Path:
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "file").write_text(text)
    return path


def test_a_directory_that_grows_is_no_checkpoint_until_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-3"
    with place.growing(target) as path:
        (path / "file").touch()
        assert path.name == target.name
        assert get_last_checkpoint(str(tmp_path)) is None
        assert [name[0] for name in names(tmp_path)] == ["_"]  # which Trainer leaves out when it uploads
    assert names(tmp_path) == ["checkpoint-3"]
    assert names(target) == ["file"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_fails_leaves_what_there_was(tmp_path: Path, exists: bool) -> None:
    target = checkpoint(tmp_path, 3, "old") if exists else tmp_path / "checkpoint-3"
    with pytest.raises(FileNotFoundError), place.growing(target) as path:
        (path / "no such" / "place").touch()
    assert names(tmp_path) == ["checkpoint-3"] * exists
    assert not exists or names(target) == ["file"]


def test_an_old_checkpoint_of_the_same_step_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, 3, "old")
    with place.growing(target) as path:
        (path / "new").touch()
    assert names(tmp_path) == ["checkpoint-3"]
    assert names(target) == ["new"]


def test_a_replacement_that_was_cut_short_is_completed(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, 3, "old")
    new = place.growing_path(target)
    new.mkdir(parents=True)
    (new / "new").touch()
    os.rename(target, new.parent / "replaced")
    place.clear_leftovers(str(tmp_path))
    assert names(tmp_path) == ["checkpoint-3"]
    assert names(target) == ["new"]


@pytest.mark.parametrize("again", [False, True], ids=["once", "for-good"])
def test_an_interrupt_between_the_two_steps_of_a_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    target = checkpoint(tmp_path, 3, "old")
    rename, calls = os.rename, []

    def interrupted(source: Path, destination: Path) -> None:
        calls.append(source)
        if len(calls) == 2 or (again and len(calls) > 2):
            raise KeyboardInterrupt
        rename(source, destination)

    def replace() -> None:
        with place.growing(target) as path:
            (path / "new").touch()

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace()
    path = place.growing_path(target)
    if again:
        assert names(path.parent) == ["checkpoint-3", "lock", "replaced"]
        place.clear_leftovers(str(tmp_path))
    assert names(tmp_path) == ["checkpoint-3"]
    assert names(target) == ["new"]


@pytest.fixture
def layered(tmp_path: Path) -> Iterator[Path]:
    """A directory of two checkpoints in a lower layer, as in the image of a container: they cannot be renamed."""
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for step in (1, 2):
        checkpoint(lower, step, "old")
    for path in (upper, work, merged):
        path.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, merged], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs the right to mount")
    yield merged
    subprocess.run(["umount", merged], check=True)


def test_checkpoints_in_a_lower_layer_are_replaced_and_removed_too(
    layered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = layered / "checkpoint-2"
    with pytest.raises(OSError, match="cross-device"):
        os.rename(target, layered / "elsewhere")

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    def replace() -> None:
        with monkeypatch.context() as patch, place.growing(target) as path:
            (path / "new").touch()
            patch.setattr(place, "remove_tree", interrupted)

    with pytest.raises(KeyboardInterrupt):
        replace()
    assert names(target) == ["file"]
    place.clear_leftovers(str(layered))
    assert names(target) == ["new"]
    place.remove_oldest(str(layered), 1, None)
    assert names(layered) == ["checkpoint-2"]
    with place.growing(target) as path:
        (path / "newer").touch()
    assert names(target) == ["newer"]


def test_leftovers_go_and_what_others_work_on_stays(tmp_path: Path) -> None:
    killed, removed = place.growing_path(tmp_path / "checkpoint-1"), place.growing_path(tmp_path / "checkpoint-2")
    killed.mkdir(parents=True)
    (removed.parent / "removed").mkdir(parents=True)
    kept = checkpoint(tmp_path, 4)
    with place.growing(tmp_path / "checkpoint-3") as path:
        (path / "file").touch()
        trainer(llama(), tmp_path, StreamingCheckpointCallback())
        assert names(tmp_path) == ["_checkpoint-3.hf-stream", "checkpoint-4"]
        with pytest.raises(CheckpointError, match="another process"), place.growing(tmp_path / "checkpoint-3"):
            pass
    assert names(tmp_path) == ["checkpoint-3", kept.name]


@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3, 9])
@pytest.mark.parametrize("best", [None, 1, 4, 5, 7])
@pytest.mark.parametrize("apart", [True, False], ids=["by-time", "by-number"])
def test_those_are_removed_that_trainer_would_remove(
    tmp_path: Path, limit: int | None, best: int | None, apart: bool
) -> None:
    left = []
    for who, remove in (("plain", rotate_checkpoints), ("ours", place.remove_oldest)):
        for number, step in enumerate([5, 4, 1, 10]):
            path = checkpoint(tmp_path / who, step)
            now = time.time() + number * apart
            os.utime(path, (now, now))
        directory = str(tmp_path / who)
        arguments = {"use_mtime": True} if who == "plain" else {}
        remove(directory, limit, f"{directory}/checkpoint-{best}" if best else None, **arguments)
        left.append(names(tmp_path / who))
    assert left[0] == left[1]


def test_methods_are_hooked_while_a_callback_lives_and_as_before_afterwards() -> None:
    gc.collect()
    before = {name: vars(Trainer)[name] for name in METHODS}
    assert not any(hasattr(method, "__wrapped__") for method in before.values())
    first = StreamingCheckpointCallback()
    hooked = {name: vars(Trainer)[name] for name in METHODS}
    assert all(hooked[name].__wrapped__ is before[name] for name in METHODS)
    others = [StreamingCheckpointCallback(), copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    assert {name: vars(Trainer)[name] for name in METHODS} == hooked
    del first
    gc.collect()
    assert {name: vars(Trainer)[name] for name in METHODS} == hooked
    others.clear()
    gc.collect()
    assert {name: vars(Trainer)[name] for name in METHODS} == before


def test_the_arguments_are_there_to_see() -> None:
    parameters = inspect.signature(StreamingCheckpointCallback).parameters
    assert list(parameters) == ["layout", "max_shard_size", "durable", "buffer_size", "progress"]
    assert parameters["max_shard_size"].default == "50GB"
    with pytest.raises(TypeError, match="max_shard_sise"):
        StreamingCheckpointCallback(max_shard_sise="1GB")


def test_arguments_are_looked_at_before_anything_is_trained() -> None:
    for arguments, words in (
        ({"layout": "packed-qkv"}, "layout= is 'packed-qkv'"),
        ({"layout": lambda tensors: tensors}, "layout= must have an inverse, .* got the function"),
        ({"max_shard_size": "5 gigabytes"}, "unit 'gigabytes'"),
        ({"max_shard_size": -1}, "max_shard_size= is -1"),
        ({"buffer_size": "much"}, "buffer_size=: size 'much'"),
        ({"durable": "no"}, "durable= is 'no'"),
    ):
        with pytest.raises(HfStreamError, match=words):
            StreamingCheckpointCallback(**arguments)
    assert StreamingCheckpointCallback(buffer_size="1MiB").settings.buffer_size == 1 << 20


def test_what_somebody_else_puts_over_a_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = StreamingCheckpointCallback()
    hook = vars(Trainer)["_save_scaler"]

    def over(*args: Any) -> Any:
        return hook(*args)

    monkeypatch.setattr(Trainer, "_save_scaler", over)
    del callback
    gc.collect()
    assert vars(Trainer)["_save_scaler"] is over
    assert not hasattr(vars(Trainer)["_save"], "__wrapped__")
    monkeypatch.setattr(Trainer, "_save_scaler", hook.__wrapped__)


def test_an_old_hook_below_what_somebody_else_put_over_it_keeps_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(settings: Any, trainer: Any, plain: Any, output_dir: str) -> None:
        calls.append(output_dir)
        plain(output_dir)

    monkeypatch.setattr(hooks, "METHODS", {"_save_scaler": counted})
    first = StreamingCheckpointCallback()
    hook = vars(Trainer)["_save_scaler"]
    monkeypatch.setattr(Trainer, "_save_scaler", lambda *args: hook(*args))
    del first
    gc.collect()
    trainer(llama(), tmp_path, StreamingCheckpointCallback())._save_scaler("there")
    assert calls == ["there"]
    gc.collect()
    monkeypatch.setattr(Trainer, "_save_scaler", hook.__wrapped__)


def test_trainers_in_threads_save_and_restore_generators_at_once(tmp_path: Path) -> None:
    run = trainer(llama(), tmp_path, StreamingCheckpointCallback())

    def turn(number: int) -> None:
        directory = str(tmp_path / str(number))
        for _ in range(10):
            run._save_rng_state(directory)
            run._load_rng_state(directory)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(turn, range(4)))


def test_a_trainer_without_the_callback_is_as_ever(tmp_path: Path) -> None:
    callback = StreamingCheckpointCallback()
    trainer(llama(), tmp_path, max_steps=2).train()
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth"} <= set(names(tmp_path / "checkpoint-2"))
    del callback


def test_a_model_keeps_a_save_pretrained_of_its_own(tmp_path: Path) -> None:
    model = llama()
    mine = model.save_pretrained
    vars(model)["save_pretrained"] = mine
    run = trainer(model, tmp_path, StreamingCheckpointCallback())
    run.save_model(str(tmp_path / "saved"))
    assert vars(model)["save_pretrained"] is mine
    del vars(model)["save_pretrained"]
    run.save_model(str(tmp_path / "saved"))
    assert "save_pretrained" not in vars(model)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.XLA])
def test_sharded_training_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: DistributedType
) -> None:
    run = trainer(llama(), tmp_path)
    callback = StreamingCheckpointCallback()
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    with pytest.raises(CheckpointError, match="StreamingCheckpointCallback cannot save under"):
        callback.on_init_end(run.args, run.state, run.control, model=run.model)


def test_a_model_that_was_sharded_when_it_was_loaded_is_refused(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path)
    model._is_distributed_loading_by_transformers = True
    with pytest.raises(CheckpointError, match="sharded over ranks"):
        StreamingCheckpointCallback().on_init_end(run.args, run.state, run.control, model=model)


def test_while_one_checkpoint_is_saved_another_process_is_refused(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = trainer(llama(), tmp_path, StreamingCheckpointCallback())
    run.create_optimizer_and_scheduler(4)
    path = place.growing_path(tmp_path / "checkpoint-0")
    elsewhere = WorkDirectory(path.parent)
    with pytest.raises(CheckpointError, match="another process"):
        run._save_checkpoint(run.model, trial=None)
    elsewhere.close(remove=True)
    run._save_checkpoint(run.model, trial=None)
    assert names(tmp_path) == ["checkpoint-0"]


@pytest.mark.parametrize("what", ["work", "checkpoint-3", "replaced", "removed", "lock"])
def test_links_in_the_place_of_our_directories_lead_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """As in a downloaded directory: making a Trainer is enough to have what is left there removed."""
    outside = checkpoint(tmp_path / "outside", 3, "precious").parent
    run = tmp_path / "run"
    work = run / "_checkpoint-3.hf-stream"
    if what == "work":
        run.mkdir()
        work.symlink_to(outside)
    else:
        work.mkdir(parents=True)
        (work / what).symlink_to(outside if what != "lock" else outside / "checkpoint-3" / "file")
        if what == "checkpoint-3":
            (work / "replaced").mkdir()
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    trainer(llama(), run, StreamingCheckpointCallback())
    assert "hf_stream did not create it" in caplog.text
    with pytest.raises(CheckpointError, match="hf_stream did not create it"), place.growing(run / "checkpoint-3"):
        pass
    after = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.name != "lock")
    assert after == [path for path in before if path.name != "lock"]
    assert len(clean(run)) == 1
    trainer(llama(), run, StreamingCheckpointCallback())
    assert names(run) == (["checkpoint-3"] if (run / "checkpoint-3").exists() else [])
    assert (outside / "checkpoint-3" / "file").read_text() == "precious"


def test_a_run_directory_that_is_a_link_is_as_good_as_any(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    trainer(llama(), tmp_path / "link", StreamingCheckpointCallback(), max_steps=2, save_steps=1).train()
    assert names(tmp_path / "real") == ["checkpoint-1", "checkpoint-2"]


def test_an_old_checkpoint_comes_back_if_the_new_one_is_lost(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, 3, "old")
    work = place.growing_path(target).parent
    work.mkdir()
    os.rename(target, work / "replaced")
    place.clear_leftovers(str(tmp_path))
    assert names(target) == ["file"]


def test_a_file_in_the_place_of_a_work_directory_is_no_obstacle_to_a_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "_checkpoint-9.hf-stream").write_text("x")
    trainer(llama(), tmp_path, StreamingCheckpointCallback())
    assert "_checkpoint-9.hf-stream' is not a directory" in caplog.text


def test_a_checkpoint_is_on_the_disk_before_an_older_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    rename = os.rename

    def renamed(source: Any, target: Any, **folders: int) -> None:
        rename(source, target, **folders)
        events.append(("name", os.path.basename(target)))

    def fsync(fd: int) -> None:
        events.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

    run = trainer(llama(), tmp_path, StreamingCheckpointCallback(), max_steps=2, save_steps=1, save_total_limit=1)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "fsync", fsync)
    run.train()
    assert names(tmp_path) == ["checkpoint-2"]
    named = events.index(("name", "checkpoint-2"))
    gone = events.index(("name", "removed"))
    for name in names(tmp_path / "checkpoint-2"):
        assert any(event == ("flush", name) for event in events[events.index(("name", "checkpoint-1")) : named])
    assert ("flush", "checkpoint-2") in events[:named]
    assert ("flush", tmp_path.name) in events[named:gone]


def test_so_is_the_directory_that_was_made_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    with place.growing(tmp_path / "run-0" / "checkpoint-1") as path:
        (path / "file").touch()
    assert {"file", "checkpoint-1", "run-0", tmp_path.name} <= set(flushed)


def test_a_callback_that_is_not_durable_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise AssertionError(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", fsync)
    trainer(llama(), tmp_path, StreamingCheckpointCallback(durable=False), max_steps=2, save_steps=1).train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
