from __future__ import annotations

import errno
import os
import sys
import threading

import pytest
import torch
import tqdm
from memory_peaks import in_fresh_process

import hf_stream
from hf_stream.copying import Copy, Region, execute
from hf_stream.copying import executor as executor_module
from hf_stream.errors import CopyError
from hf_stream.storage import FileStorage


@pytest.fixture(autouse=True)
def always_threads(monkeypatch):
    monkeypatch.setattr(executor_module, "_WORTH_A_THREAD", 1)


def saves(file: FileStorage, count: int, nbytes: int = 100) -> list[Copy]:
    # Gaps, so that every copy is a move of its own.
    return [
        Copy(
            Region.of(torch.ones(nbytes, dtype=torch.uint8)),
            Region.contiguous(file, torch.uint8, (nbytes,), i * (nbytes + 1)),
            name=f"tensor.{i}",
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("failing", [0, 3, 17])
@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_error_names_tensor_and_files_and_stops_the_rest(tmp_path, monkeypatch, failing, threads):
    real, lock, calls = os.pwritev, threading.Lock(), []

    def full(fd, buffers, offset):
        with lock:
            calls.append(offset)
            number = len(calls)
        if number > failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    before = threading.active_count()
    match = r"'tensor\.\d+': .* from memory \(cpu\) .* to .*out .*No space"
    with FileStorage.create(tmp_path / "out", 101 * 50) as file, pytest.raises(CopyError, match=match) as caught:
        execute(saves(file, 50), threads=threads)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__cause__, OSError)
    assert failing < len(calls) <= failing + threads
    assert threading.active_count() == before


def test_one_failure_stops_the_threads_that_do_well(tmp_path, monkeypatch):
    real, calls = os.pwritev, []

    def first_fails(fd, buffers, offset):
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", first_fails)
    failed = pytest.raises(CopyError, match=r"'tensor\.0': .*Input/output error")
    with FileStorage.create(tmp_path / "out", 101 * 20_000) as file, failed:
        execute(saves(file, 20_000), threads=3)
    assert len(calls) < 20_000


def test_a_truncated_source_names_itself_and_the_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1000))
    target = torch.zeros(1000, dtype=torch.uint8)
    with FileStorage(path) as file:
        os.truncate(path, 400)
        copy = Copy(Region.contiguous(file, torch.uint8, (1000,)), Region.of(target), name="w")
        with pytest.raises(CopyError, match=r"'w': .*model.safetensors.*ends at byte 400"):
            execute([copy])
        cast = Copy(Region.contiguous(file, torch.bfloat16, (500,)), Region.of(torch.zeros(500)), name="w")
        with pytest.raises(CopyError, match=r"'w': .*model.safetensors.*ends before byte 1000"):
            execute([cast])


@pytest.mark.parametrize("where", ["helper", "caller"])
def test_interrupting_stops_the_threads(tmp_path, monkeypatch, where):
    real, main, calls = os.pwritev, threading.main_thread(), []
    started = threading.Event()

    def interrupted(fd, buffers, offset):
        calls.append(offset)
        if (threading.current_thread() is main) == (where == "caller"):
            started.set()
            if len(calls) > 3:
                raise KeyboardInterrupt
        elif len(calls) > 3:
            started.wait(10)  # until the other thread has had its turn
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", interrupted)
    before = threading.active_count()
    with FileStorage.create(tmp_path / "out", 101 * 5000) as file, pytest.raises(KeyboardInterrupt):
        execute(saves(file, 5000), threads=3)
    assert threading.active_count() == before
    assert len(calls) < 5000


def test_progress_adds_up_to_the_bytes_written(tmp_path):
    class Count:
        total = 0

        def update(self, n):
            self.total += n

    count = Count()
    with FileStorage.create(tmp_path / "out", 200_000) as file:
        copies = saves(file, 20)
        square = torch.zeros(100, 100)
        copies.append(Copy(Region.of(square.T), Region.contiguous(file, torch.bfloat16, (100, 100), 4000), name="t"))
        interleaved = [Region(file, torch.float32, (100, 100), (200, 1), 40_000 + 400 * i) for i in range(2)]
        copies += [Copy(Region.of(torch.zeros(100, 100)), target, name="i") for target in interleaved]
        execute(copies, progress=count, threads=2)
    assert count.total == 20 * 100 + 20_000 + 80_000


def test_an_error_in_progress_comes_through_as_it_is(tmp_path):
    class Broken:
        def update(self, n):
            raise ZeroDivisionError

    with FileStorage.create(tmp_path / "out", 101 * 5) as file, pytest.raises(ZeroDivisionError):
        execute(saves(file, 5), progress=Broken(), threads=2)


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_a_bar_is_shown_when_asked_for_and_not_off_a_terminal(tmp_path, capsys, progress, shown):
    with FileStorage.create(tmp_path / "out", 101 * 5) as file:
        execute(saves(file, 5), progress=progress, desc="Saving")
    out, err = capsys.readouterr()
    assert out == ""
    assert ("Saving: 100%" in err) is shown


BOUNDED = """
import sys, torch
from memory_peaks import peak_of
from hf_stream.copying import Copy, Region, execute
from hf_stream.storage import FileStorage

kind, src, dst, rows, cols = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
with FileStorage(src) as source, FileStorage(dst, "r+") as target:
    dtype = torch.float32 if kind == "cast" else torch.bfloat16
    def copy(n):
        into = Region(target, dtype, (n, rows), (rows, 1), 0)
        return Copy(Region(source, torch.bfloat16, (n, rows), (1, cols), 0), into)
    execute([copy(8)])
    print(peak_of(lambda: execute([copy(cols)], buffer_size=16 << 20, threads=2)))
"""


@pytest.mark.parametrize("kind", ["raw", "cast"])
def test_a_large_transpose_stays_within_the_buffer(tmp_path, kind):
    rows, cols = 8192, 10_000
    nbytes = rows * cols * (4 if kind == "cast" else 2)
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.write_bytes(bytes(range(256)) * (rows * cols * 2 // 256))
    FileStorage.create(dst, nbytes).close()
    # The interpreter and malloc take some too.
    assert int(in_fresh_process(BOUNDED, kind, src, dst, rows, cols)) < (16 << 20) + (6 << 20)
    mapped = torch.from_file(str(src), size=rows * cols, dtype=torch.int16).view(rows, cols)
    written = torch.from_file(str(dst), size=rows * cols, dtype=torch.float32 if kind == "cast" else torch.int16)
    expected = mapped.T[::97] if kind == "raw" else mapped.view(torch.bfloat16).T[::97].float()
    assert torch.equal(written.view(cols, rows)[::97].nan_to_num(), expected.nan_to_num())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_to_the_gpu_and_back(tmp_path, dtype):
    content = torch.randn(3000, 2000).to(torch.bfloat16)
    (tmp_path / "in").write_bytes(content.view(torch.uint8).numpy().tobytes())
    on_device = torch.empty(3000, 2000, dtype=dtype, device="cuda")
    with FileStorage(tmp_path / "in") as src, FileStorage.create(tmp_path / "out", 12_000_000) as dst:
        execute([Copy(Region.contiguous(src, torch.bfloat16, (3000, 2000)), Region.of(on_device))], buffer_size=1 << 20)
        assert torch.equal(on_device.cpu(), content.to(dtype))
        into = Region.contiguous(dst, torch.bfloat16, (2000, 3000))
        execute([Copy(Region.of(on_device.T), into)], buffer_size=1 << 20)
    assert (tmp_path / "out").read_bytes() == content.T.contiguous().view(torch.uint8).numpy().tobytes()


def test_no_thread_goes_on_where_another_cannot_start(tmp_path, monkeypatch):
    start, started = threading.Thread.start, []

    def limited(self):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    before = threading.active_count()
    with FileStorage.create(tmp_path / "out", 101 * 5000) as file, pytest.raises(RuntimeError, match="can't start"):
        execute(saves(file, 5000), threads=3)
    assert threading.active_count() == before
    assert not started[0].is_alive()


def test_casts_go_to_any_byte_of_a_file(tmp_path):
    halves = [torch.randn(40, 8), torch.randn(40, 8)]
    with FileStorage.create(tmp_path / "out", 1 + 40 * 32) as file:
        targets = [Region(file, torch.bfloat16, (40, 8), (16, 1), 1 + 16 * i) for i in range(2)]
        execute([Copy(Region.of(half), target) for half, target in zip(halves, targets, strict=True)])
    expected = torch.cat(halves, 1).bfloat16()
    assert (tmp_path / "out").read_bytes()[1:] == expected.view(torch.uint8).numpy().tobytes()


def test_neighbours_that_are_read_in_one_call_are_all_named_as_possible_culprits(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(bytes(800))
    with FileStorage(path) as source:
        os.truncate(path, 500)
        copies = [
            Copy(
                Region.contiguous(source, torch.uint8, (200,), at),
                Region.of(torch.empty(200, dtype=torch.uint8)),
                (),
                name,
            )
            for at, name in ((0, "a"), (200, "b"), (400, "c"))
        ]
        with pytest.raises(CopyError, match="'a' or one of the next 2 tensors"):
            execute(copies)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", ["helper", "caller"])
def test_whatever_a_callback_raises_in_whatever_thread_stops_the_run(tmp_path, kind, where):
    started = threading.Event()

    class Interrupts:
        calls = 0

        def update(self, n):
            here = "caller" if threading.current_thread() is threading.main_thread() else "helper"
            if here == where:
                self.calls += 1
                started.set()
                raise kind
            started.wait(10)  # until the other thread has had its turn

    bar = Interrupts()
    with FileStorage.create(tmp_path / "out", 101 * 500) as file, pytest.raises(kind):
        execute(saves(file, 500), progress=bar, threads=2)
    assert bar.calls == 1


def test_an_interrupt_in_a_helper_thread_publishes_nothing(tmp_path):
    class Interrupts:
        def update(self, n):
            if threading.current_thread() is not threading.main_thread():
                raise KeyboardInterrupt

    tensors = {f"t{n}": torch.ones(1 << 18) for n in range(40)}
    hf_stream.save_checkpoint({"old": torch.ones(2)}, tmp_path / "there")
    for name in ("there", "new"):
        with pytest.raises(KeyboardInterrupt):
            hf_stream.save_checkpoint(tensors, tmp_path / name, progress=Interrupts())
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "model.safetensors"]


def test_no_bar_is_made_that_is_not_shown(tmp_path, monkeypatch):
    # It would take a lock that all forked processes share.
    def made(*_, **__):
        raise AssertionError("a bar was made")

    monkeypatch.setattr(tqdm.tqdm, "__new__", made)
    for progress in (None, False):
        with FileStorage.create(tmp_path / str(progress), 101 * 5) as file:
            execute(saves(file, 5), progress=progress)
    monkeypatch.setattr(sys, "stderr", None)
    with FileStorage.create(tmp_path / "without", 101 * 5) as file:
        execute(saves(file, 5), progress=None)
