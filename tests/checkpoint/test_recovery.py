from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import chdir, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from safetensors.torch import load_file, save_file
from samples import files_of

import hf_stream
from hf_stream.checkpoint import clean, settle
from hf_stream.checkpoint import journal as journals
from hf_stream.checkpoint.staging import Staging
from hf_stream.errors import CheckpointError

_OLD = {f"t{n}": torch.zeros(500) for n in range(4)}
_NEW = {f"t{n}": torch.ones(500) for n in range(4)}
_THEIRS = {f"t{n}": torch.full((500,), 7.0) for n in range(4)}


class _Killed(BaseException):
    pass


def _cut_short(directory: Path, monkeypatch: pytest.MonkeyPatch, changes: int, max_shard_size: int = 4100) -> None:
    """Save `_NEW` over what is there, and leave everything as it is after `changes` removals and moves in there."""
    rename, unlink, done = os.rename, os.unlink, 0

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **folders: int) -> None:
            nonlocal done
            if (directory / ".hf-stream" / "journal.json").exists():
                if done == changes:
                    raise _Killed
                done += 1
            function(*args, **folders)

        return call

    def abandon(staging: Staging, *, keep: bool = False) -> None:
        work = staging._work
        if not work.closed:
            os.close(work._lock)
            os.close(work.fd)
        work.fd = work._lock = -1

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", counted(rename))
        patch.setattr(os, "unlink", counted(unlink))
        patch.setattr(Staging, "abandon", abandon)
        with pytest.raises(_Killed):
            hf_stream.save_checkpoint(_NEW, directory, max_shard_size=max_shard_size)


def _values(directory: Path) -> set[float]:
    return {float(x) for tensor in hf_stream.open_checkpoint(directory).values() for x in tensor.materialize().unique()}


# Newer work than what a killed save has left


def _settle(directory: Path) -> None:
    settle(directory)


def _abandoned_writer(directory: Path) -> None:
    hf_stream.CheckpointWriter(directory, _OLD).abandon()


def _failed_save(directory: Path) -> None:
    class Fails:
        def update(self, n: int) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hf_stream.save_checkpoint(_OLD, directory, progress=Fails())


@pytest.mark.parametrize("changes", range(7))
@pytest.mark.parametrize("theirs", ["one file", "same names"])
@pytest.mark.parametrize("then", [_settle, _abandoned_writer, _failed_save, clean])
def test_newer_weights_of_somebody_else_stay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: int,
    theirs: str,
    then: Callable[[Path], None],
) -> None:
    hf_stream.save_checkpoint(_OLD, tmp_path, max_shard_size=4100)
    _cut_short(tmp_path, monkeypatch, changes)
    if theirs == "one file":
        # As transformers does: what is not among its own files goes.
        for file in tmp_path.glob("model*"):
            file.unlink()
        save_file(_THEIRS, tmp_path / "model.safetensors")
    else:
        hf_stream.save_checkpoint(_THEIRS, tmp_path / "x", max_shard_size=4100)
        for file in (tmp_path / "x").iterdir():
            shutil.copyfile(file, tmp_path / file.name)
        shutil.rmtree(tmp_path / "x")
    before = files_of(tmp_path)
    with caplog.at_level(logging.WARNING, "hf_stream"):
        then(tmp_path)
    left = files_of(tmp_path)
    assert left == {name: data for name, data in before.items() if not name.startswith(".hf-stream")}
    assert _values(tmp_path) == {7.0}
    assert "is given up" in caplog.text


@pytest.mark.parametrize("changes", range(1, 7))
def test_a_small_file_that_somebody_has_changed_stays_and_the_weights_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    hf_stream.save_checkpoint(_OLD, tmp_path, max_shard_size=4100)
    save_file(_OLD, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    _cut_short(tmp_path, monkeypatch, changes)
    (tmp_path / "config.json").write_text('{"changed": true}')
    with pytest.raises(CheckpointError, match="settle"):
        hf_stream.open_checkpoint(tmp_path)
    settle(tmp_path)
    assert _values(tmp_path) == {1.0}
    assert (tmp_path / "config.json").read_text() == '{"changed": true}'
    assert not (tmp_path / ".hf-stream").exists()


def test_what_was_completed_is_on_the_disk_before_the_journal_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_stream.save_checkpoint(_OLD, tmp_path, max_shard_size=4100)
    _cut_short(tmp_path, monkeypatch, 4)
    rename, unlink, events = os.rename, os.unlink, []

    def renamed(source: Any, target: Any, **folders: int) -> None:
        rename(source, target, **folders)
        events.append("rename")

    def unlinked(path: Any, **folders: int) -> None:
        unlink(path, **folders)
        events.append(os.path.basename(path))

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")))
    settle(tmp_path)
    last = len(events) - events[::-1].index("rename")
    assert str(tmp_path) in events[last : events.index("journal.json")]


def test_a_copy_of_a_directory_can_be_completed_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_stream.save_checkpoint(_OLD, tmp_path / "a", max_shard_size=4100)
    _cut_short(tmp_path / "a", monkeypatch, 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    settle(tmp_path / "b")
    assert _values(tmp_path / "b") == {1.0}


# Mixtures


@pytest.mark.parametrize("config", [True, False], ids=["with-config", "weights-alone"])
@pytest.mark.parametrize("new_size", ["1GB", 4100, 6100])
@pytest.mark.parametrize("old_size", ["1GB", 4100])
def test_a_config_is_never_beside_weights_of_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_size: str | int, new_size: str | int, config: bool
) -> None:
    """Seen by whoever knows nothing of us, and loads config.json and what weights there are, or weights without it."""
    source, out = tmp_path / "source", tmp_path / "out"
    hf_stream.save_checkpoint(_OLD, out, max_shard_size=old_size)
    torch.save(_THEIRS, out / "pytorch_model.bin")  # older still
    (out / "config.json").write_text('{"of": 0}')
    hf_stream.save_checkpoint(_NEW, source, max_shard_size=new_size)
    if config:
        (source / "config.json").write_text('{"of": 1}')
    seen: list[tuple[float | None, int | None, bool]] = []

    def look() -> None:
        weights = None
        if (index := out / "model.safetensors.index.json").exists():
            files = set(json.loads(index.read_text())["weight_map"].values())
            (weights,) = {float(x) for file in files for t in load_file(out / file).values() for x in t.unique()}
        if (single := out / "model.safetensors").exists():
            assert weights is None
            (weights,) = {float(x) for t in load_file(single).values() for x in t.unique()}
        there = (out / "config.json").exists()
        of = json.loads((out / "config.json").read_text())["of"] if there else None
        seen.append((weights, of, (out / "pytorch_model.bin").exists()))

    def watched(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **folders: int) -> None:
            look()
            function(*args, **folders)
            look()

        return call

    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(os, "unlink", watched(os.unlink))
    hf_stream.convert(source, out, max_shard_size=new_size)
    monkeypatch.undo()
    before, after = (0.0, 0), (1.0, 1 if config else 0)
    for weights, of, others in seen:
        # All that is old, all that is new, or no weights at all, in no format.
        assert (weights, of) in (before, after) or (weights is None and not others)
    assert seen[-1] == (*after, True)
    assert _values(out) == {1.0}


def test_weights_of_another_kind_stay_in_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of an optimizer is saved beside a model: nobody would load one for the other."""
    hf_stream.save_checkpoint(_OLD, tmp_path)
    hf_stream.save_nested([_OLD], tmp_path, max_shard_size=4100)
    unlink, seen = os.unlink, []

    def watched(path: Any, **folders: int) -> None:
        unlink(path, **folders)
        seen.append((tmp_path / "model.safetensors").exists())

    monkeypatch.setattr(os, "unlink", watched)
    hf_stream.save_nested([_NEW], tmp_path, max_shard_size=6100)
    assert len(seen) > 3
    assert all(seen)


def test_what_was_hidden_comes_back_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in range(9):
        for superseded in (False, True):
            out = tmp_path / f"{changes}{superseded}"
            hf_stream.save_checkpoint(_OLD, out, max_shard_size=4100)
            torch.save(_THEIRS, out / "pytorch_model.bin")
            _cut_short(out, monkeypatch, changes)
            if superseded:
                save_file(_THEIRS, out / "model.safetensors")
            settle(out)
            assert torch.load(out / "pytorch_model.bin")["t0"].unique().tolist() == [7.0]
            assert _values(out) == ({7.0} if superseded else {1.0})
            assert not (out / ".hf-stream").exists()


# Directories that are not ours


def _plant(directory: Path, where: str, outside: Path) -> None:
    """Put something hostile into a directory's work directory."""
    work = directory / ".hf-stream"
    if where == "work":
        os.symlink(outside, work)
        return
    if where in ("a file", "a pipe"):
        work.write_text("") if where == "a file" else os.mkfifo(work)
        return
    work.mkdir()
    if where in ("files", "growing", "lock", "journal.json", "journal.json.new"):
        os.symlink(outside if where in ("files", "growing") else outside / "precious", work / where)
    elif where == "link in files":
        (work / "files").mkdir()
        os.symlink(outside, work / "files" / "sub")
    elif where.startswith("pipe"):
        os.mkfifo(work / where.removeprefix("pipe "))
    elif where == "socket":
        with closing(socket.socket(socket.AF_UNIX)) as server, chdir(work):
            server.bind("journal.json")  # absolute paths may be too long
    else:
        (work / "journal.json").write_text(where)


_LINKS = [
    "work",
    "files",
    "growing",
    "lock",
    "journal.json",
    "link in files",
    "pipe lock",
    "pipe journal.json",
    "pipe files",
    "socket",
    "a file",
    "a pipe",
]
_NOT_JOURNALS = [
    "[]",
    "null",
    "1",
    "{}",
    "not json",
    "[" * 100_000,
    '{"version": 2, "fingerprint": null, "boot": null}',
    '{"version": 1, "fingerprint": 5, "boot": null}',
    '{"version": 1, "fingerprint": null, "boot": []}',
    '{"version": 1, "fingerprint": null, "boot": null, "replacement": 1}',
    '{"version": 1, "fingerprint": null, "boot": null, "replacement": {"old": 1}}',
    '{"version": 1, "fingerprint": null, "boot": null, "more": 1}',
    '{"replacing": {"remove": ["/etc/x"], "move": []}}',
    "[" + "[]," * 100_000 + "[]]",
]


def _replacing(**parts: list[list[Any]]) -> str:
    replacement = {"old": [], "new": [], "hidden": [], **parts}
    return json.dumps({"version": 1, "fingerprint": None, "boot": None, "replacement": replacement})


def _hostile_journals(outside: Path) -> list[str]:
    precious = outside / "precious"
    state = [precious.stat().st_size, precious.stat().st_mtime_ns]
    names = [str(precious), "../outside/precious", "a/../../outside/precious", "", ".", "..", "a//b", "/", "x\0y", "a/"]
    names += ["\ud800.bin", "x" * 300 + ".bin"]
    return [
        *(_replacing(old=[[name, *state]]) for name in names),
        *(_replacing(new=[[name, *state]]) for name in names),
        *(_replacing(hidden=[[name, *state]]) for name in names),
        _replacing(hidden=[["notes.txt", *state]]),
        _replacing(old=[["notes.txt", *state]]),  # we only ever remove weights
        _replacing(old=[["model.safetensors", "1", 1]]),
        _replacing(old=[["model.safetensors", 1]]),
        _replacing(old=[["model.safetensors", True, 1]]),
        _replacing(old=[["model.safetensors", 1e300, 1]]),
    ]


def _tries(directory: Path) -> list[Callable[[], object]]:
    return [
        # Without a journal there is nothing to settle.
        *([lambda: settle(directory)] if os.path.lexists(directory / ".hf-stream" / "journal.json") else []),
        lambda: hf_stream.save_checkpoint(_NEW, directory),
        lambda: hf_stream.CheckpointWriter(directory, _NEW).abandon(),
        lambda: hf_stream.convert(directory.with_name("source"), directory),
        lambda: hf_stream.save_nested([_NEW], directory),
    ]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "precious").write_text("precious")
    hf_stream.save_checkpoint(_OLD, tmp_path / "source")
    return directory


def _in_time(call: Callable[[], object]) -> None:
    """What hangs ends the test."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        call()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("where", [*_LINKS, *_NOT_JOURNALS, *range(42)], ids=lambda where: str(where)[:20])
def test_what_we_have_not_left_is_refused_in_words_and_can_be_cleared(
    tmp_path: Path, outside: Path, where: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    hf_stream.save_checkpoint(_OLD, out)
    _plant(out, where if isinstance(where, str) else _hostile_journals(outside)[where], outside)
    before = files_of(outside)
    weights = (out / "model.safetensors").read_bytes()
    # Opening reads what is there, and is not told what to do by it.
    _in_time(lambda: hf_stream.open_checkpoint(out))
    for attempt in _tries(out):
        with pytest.raises(CheckpointError, match=r"clean") as caught:
            _in_time(attempt)
        assert str(out / ".hf-stream") in str(caught.value)
        assert (out / "model.safetensors").read_bytes() == weights
        assert files_of(outside) == before
    assert clean(out) == [out / ".hf-stream"]
    assert files_of(outside) == before
    assert not os.path.lexists(out / ".hf-stream")
    hf_stream.save_checkpoint(_NEW, out)
    assert _values(out) == {1.0}


def test_a_plan_says_what_is_wrong_with_a_journal_too(tmp_path: Path, outside: Path) -> None:
    out = tmp_path / "out"
    plan = hf_stream.plan_conversion(tmp_path / "source", out)
    assert plan.kept(out) is None
    out.mkdir()
    _plant(out, "[]", outside)
    with pytest.raises(CheckpointError, match="is not a valid journal"):
        plan.kept(out)
    clean(out)
    (out / ".hf-stream").write_text("")
    with pytest.raises(CheckpointError, match="is a link or a file"):
        plan.kept(out)


def test_a_journal_that_would_take_much_to_read_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / ".hf-stream" / "journal.json"
    journal.parent.mkdir()
    journal.write_text("[" + "[]," * 1000 + "[]]")
    with pytest.raises(CheckpointError, match="holds more lists than a journal does"):
        settle(tmp_path)
    monkeypatch.setattr(journals, "_MAX_NBYTES", 300)
    with pytest.raises(CheckpointError, match="has 3004 bytes, which no journal has"):
        settle(tmp_path)
    clean(tmp_path)
    hf_stream.save_checkpoint(_OLD, tmp_path, max_shard_size=4100)
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match="there are too many files to replace them"):
        hf_stream.save_checkpoint(_NEW, tmp_path, max_shard_size=4100)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_folder_of_the_destination_that_leads_elsewhere_is_refused(tmp_path: Path, outside: Path, kind: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "sub").mkdir()
    (source / "sub" / "precious").write_text("new")
    hf_stream.save_checkpoint(_OLD, out)
    if kind == "link":
        os.symlink(outside, out / "sub")
    else:
        (out / "sub").write_text("x")
    before = files_of(outside)
    with pytest.raises(CheckpointError, match=f"sub' is a {kind} where a folder is to be"):
        hf_stream.convert(source, out, resume=False)
    assert files_of(outside) == before
    assert _values(out) == {0.0}
    assert not (out / ".hf-stream").exists()


def test_what_is_beside_a_new_destination_is_refused_as_well(tmp_path: Path, outside: Path) -> None:
    os.symlink(outside, tmp_path / ".out.hf-stream")
    with pytest.raises(CheckpointError, match=r"\.out\.hf-stream' is a link to .*clean"):
        hf_stream.save_checkpoint(_NEW, tmp_path / "out")
    assert clean(tmp_path / "out") == [tmp_path / ".out.hf-stream"]
    assert files_of(outside) == {"precious": b"precious"}
    hf_stream.save_checkpoint(_NEW, tmp_path / "out")


def test_clearing_from_the_command_line(tmp_path: Path, outside: Path) -> None:
    hf_stream.save_checkpoint(_OLD, tmp_path / "out")
    _plant(tmp_path / "out", "files", outside)
    done = run("clean", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'out' / '.hf-stream'}\n")
    assert run("clean", tmp_path / "out").stderr == "nothing to remove\n"
    assert run("clean", tmp_path / "out", "-q").stderr == ""
    assert files_of(outside) == {"precious": b"precious"}


def test_clearing_completes_what_can_be_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_stream.save_checkpoint(_OLD, tmp_path, max_shard_size=4100)
    _cut_short(tmp_path, monkeypatch, 3)
    assert clean(tmp_path) == [tmp_path / ".hf-stream"]
    assert _values(tmp_path) == {1.0}
    assert clean(tmp_path) == []


@pytest.mark.parametrize("with_others", [True, False])
def test_clearing_never_removes_the_only_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_others: bool
) -> None:
    hf_stream.save_checkpoint(_OLD, tmp_path / "a", max_shard_size=4100)
    if with_others:
        torch.save(_THEIRS, tmp_path / "a" / "pytorch_model.bin")
    _cut_short(tmp_path / "a", monkeypatch, 4)
    # What somebody's file manager has dropped there, and a link, are no reason to lose anything.
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copy2)
    (tmp_path / "b" / ".hf-stream" / ".DS_Store").write_text("x")
    (tmp_path / "b" / ".hf-stream" / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.DS_Store|link"):
        settle(tmp_path / "b")
    clean(tmp_path / "b")
    assert _values(tmp_path / "b") == {1.0}
    assert (tmp_path / "b" / "pytorch_model.bin").exists() == with_others
    # A copy that has not kept the times cannot be told from one that was changed: nothing is removed.
    shutil.copytree(tmp_path / "a", tmp_path / "c", copy_function=shutil.copyfile)
    before = files_of(tmp_path / "c")
    for attempt in (lambda: settle(tmp_path / "c"), lambda: clean(tmp_path / "c"), *_tries(tmp_path / "c")[1:3]):
        with pytest.raises(CheckpointError, match=r"cannot be completed.*clean --force"):
            attempt()
        left = files_of(tmp_path / "c")
        assert {name: left[name] for name in before} == before
    with pytest.raises(CheckpointError, match="cut short"):
        hf_stream.open_checkpoint(tmp_path / "c")
    # A directory in the way of a new file.
    shutil.copytree(tmp_path / "a", tmp_path / "d", copy_function=shutil.copy2)
    name = next(path.name for path in (tmp_path / "d" / ".hf-stream" / "files").glob("*.safetensors*"))
    (tmp_path / "d" / name).unlink(missing_ok=True)
    (tmp_path / "d" / name).mkdir()
    with pytest.raises(CheckpointError, match="is a directory where a file is to be"):
        clean(tmp_path / "d")
    (tmp_path / "d" / name).rmdir()
    clean(tmp_path / "d")
    assert _values(tmp_path / "d") == {1.0}
    clean(tmp_path / "c", force=True)
    assert not (tmp_path / "c" / ".hf-stream").exists()
    # What was only out of sight is no part of what is given up.
    assert (tmp_path / "c" / "pytorch_model.bin").exists() == with_others


def test_what_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmtree(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / ".hf-stream" / "files").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(CheckpointError, match=r"\.hf-stream' is still there: it cannot be removed"):
        clean(tmp_path)


def test_clearing_where_there_is_nothing_to_clear_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "no" / "such", tmp_path / "file"):
        with pytest.raises(CheckpointError, match="is no directory"):
            clean(place)
    assert clean(tmp_path / "not-yet") == []


def test_finished_work_that_cannot_be_taken_up_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Staging(tmp_path / "out", "f")
    first.create("w.pt", 3).close()
    first.finish("w.pt")
    first.abandon(keep=True)
    Staging(tmp_path / "out", "g").abandon()
    assert "1 finished files of another, interrupted run are discarded" in caplog.text


def test_clearing_leaves_alone_what_somebody_works_in(tmp_path: Path) -> None:
    with hf_stream.CheckpointWriter(tmp_path, {"x": torch.ones(2)}) as writer:
        with pytest.raises(CheckpointError, match="another process is saving"):
            clean(tmp_path)
        writer.write("x", torch.ones(2))
    assert list(hf_stream.open_checkpoint(tmp_path)) == ["x"]


# Processes and file systems


def test_a_forked_child_leaves_its_parents_work_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with hf_stream.CheckpointWriter(out, {"x": torch.ones(2)}) as writer:
        writer.write("x", torch.ones(2))
        for ending in (writer.abandon, writer.close, lambda: None):
            child = os.fork()
            if not child:
                code = 1
                try:
                    ending()
                    code = 0
                except CheckpointError as error:
                    code = 7 if "only the process" in str(error) else 1
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == (7 if ending == writer.close else 0)
        with pytest.raises(CheckpointError, match="another process"):
            hf_stream.save_checkpoint(_NEW, out)
    assert list(hf_stream.open_checkpoint(out)) == ["x"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    for size in ("1GB", 4100):
        hf_stream.save_checkpoint(_NEW, tmp_path / "out", max_shard_size=size)
        assert not hf_stream.verify(_NEW, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / ".hf-stream").exists()


def test_a_clean_up_that_fails_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rmtree(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(ZeroDivisionError), hf_stream.CheckpointWriter(tmp_path / "a", _NEW):
        raise ZeroDivisionError
    hf_stream.save_checkpoint(_NEW, tmp_path / "b")
    assert _values(tmp_path / "b") == {1.0}
    assert caplog.text.count("cannot be removed: Permission denied") == 2


@pytest.mark.parametrize("exists", [False, True])
def test_a_disk_that_is_full_from_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    hf_stream.save_checkpoint(_OLD, tmp_path / "source")
    out = tmp_path / "a" / "out"
    if exists:
        hf_stream.save_checkpoint(_OLD, out)
    before = sorted(path for path in tmp_path.rglob("*"))
    open_, mkdir = os.open, os.mkdir
    left = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if function is mkdir or (args and args[0] & os.O_CREAT):
                if not left:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
                left -= 1
            return function(path, *args, **kwargs)

        return call

    for limit in range(6):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", counted(open_))
            patch.setattr(os, "mkdir", counted(mkdir))
            left = limit
            with pytest.raises(CheckpointError, match="No space left on device"):
                hf_stream.convert(tmp_path / "source", out)
        assert sorted(path for path in tmp_path.rglob("*")) == before
