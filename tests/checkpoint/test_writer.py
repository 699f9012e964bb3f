from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import DTYPES, files_of, named_tensors, random_bits, same_bits

import hf_stream
from hf_stream import CheckpointWriter
from hf_stream.errors import CheckpointError, CopyError
from hf_stream.lazy import write_into


@settings(max_examples=40, deadline=None)
@given(tensors=named_tensors(), limit=st.integers(1, 200), data=st.data())
def test_any_order_gives_the_files_of_save(tmp_path_factory: pytest.TempPathFactory, tensors, limit, data) -> None:
    top = tmp_path_factory.mktemp("writer")
    hf_stream.save_checkpoint(tensors, top / "saved", max_shard_size=limit)
    with CheckpointWriter(top / "written", tensors, max_shard_size=limit) as writer:
        for name in data.draw(st.permutations(list(tensors))):
            tensor = tensors[name]
            if tensor.dim() and tensor.shape[-1] > 1 and tensor.dtype != torch.float4_e2m1fn_x2:
                at = data.draw(st.integers(0, tensor.shape[-1]))
                writer.write_slice(name, (..., slice(at, None)), tensor[..., at:])
                writer.write_slice(name, (..., slice(at)), tensor[..., :at])
            else:
                writer.write(name, tensor)
    assert files_of(top / "written") == files_of(top / "saved")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_from_many_threads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_bits((16, 3, 2), dtype, 5)
    with CheckpointWriter(tmp_path / "out", {"x": tensor}) as writer, ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda row: writer.write_slice("x", row, tensor[row]), reversed(range(16))):
            pass
    assert same_bits(load_file(tmp_path / "out/model.safetensors")["x"], tensor)


def test_specs_need_nothing_but_a_shape_and_a_dtype(tmp_path: Path) -> None:
    class Spec:
        shape = (2, 3)
        dtype = torch.bfloat16

    with CheckpointWriter(tmp_path / "out", {"x": Spec(), "scalar": torch.empty((), device="meta")}) as writer:
        writer.write("x", torch.ones(2, 3, dtype=torch.bfloat16))
        writer.write("scalar", torch.tensor(2.0))
    assert load_file(tmp_path / "out/model.safetensors")["scalar"] == 2


def test_what_was_never_written_is_named_and_nothing_appears(tmp_path: Path) -> None:
    specs = {"x": torch.empty(4, 6), "y": torch.empty(2), "none": torch.empty(0, 3)}

    def write_most() -> None:
        with CheckpointWriter(tmp_path / "out", specs) as writer:
            writer.write_slice("x", slice(0, 2), torch.ones(2, 6))
            writer.write_slice("x", (slice(2, 4), slice(1, 6)), torch.ones(2, 5))

    with pytest.raises(CheckpointError, match=r"2 of 3 tensors are not whole: 'x' lacks \[2:4, 0:1\]"):
        write_most()
    assert list(tmp_path.iterdir()) == []


def test_the_writer_goes_on_after_a_refused_close(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", {"x": torch.empty(4)})
    with pytest.raises(CheckpointError, match="not whole"):
        writer.close()
    writer.write("x", torch.ones(4))
    writer.close()
    writer.close()
    writer.abandon()
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["x"], torch.ones(4))
    with pytest.raises(CheckpointError, match="closed"):
        writer.write("x", torch.ones(4))


def test_an_error_inside_the_block_leaves_nothing(tmp_path: Path) -> None:
    hf_stream.save_checkpoint({"old": torch.ones(2)}, tmp_path)
    before = files_of(tmp_path)

    def fail() -> None:
        with CheckpointWriter(tmp_path, {"x": torch.empty(4)}) as writer:
            writer.write("x", torch.ones(4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "index", "tensor", "fact"),
    [
        ("z", ..., torch.ones(4, 6), "not among the 1 tensors"),
        ("x", ..., torch.ones(6, 4), r"shape \[4, 6\].*got shape \[6, 4\]"),
        ("x", ..., torch.ones(4, 6, dtype=torch.float64), "torch.float64"),
        ("x", 4, torch.ones(6), "index 4"),
        ("x", slice(0, 4, 2), torch.ones(2, 6), "step 1"),
        ("x", (0, 0, 0), torch.ones(()), "3 indices"),
        ("x", ..., torch.ones(4, 6, device="meta"), "meta device"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, name: str, index: object, tensor: torch.Tensor, fact: str
) -> None:
    writer = CheckpointWriter(tmp_path / "out", {"x": torch.empty(4, 6)})
    with pytest.raises(CheckpointError, match=fact):
        writer.write_slice(name, index, tensor)
    writer.abandon()


def test_a_slice_that_failed_when_written_again_counts_as_not_written(tmp_path: Path) -> None:
    save_file({"x": torch.ones(100)}, tmp_path / "short.safetensors")
    short = hf_stream.open_checkpoint(tmp_path / "short.safetensors")["x"]
    (tmp_path / "short.safetensors").write_bytes(b"")
    writer = CheckpointWriter(tmp_path / "out", {"x": torch.empty(100)})
    writer.write("x", torch.zeros(100))
    with pytest.raises(CopyError):
        writer.write("x", short)
    with pytest.raises(CheckpointError, match=r"'x' lacks \[0:100\]"):
        writer.close()
    writer.abandon()


def test_close_does_not_pull_the_file_from_under_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, go_on = threading.Event(), threading.Event()
    writer = CheckpointWriter(tmp_path / "out", {"x": torch.empty(4)})
    writer.write("x", torch.zeros(4))

    def slowly(jobs, **kwargs):
        writing.set()
        assert go_on.wait(30)
        write_into(jobs, **kwargs)

    monkeypatch.setattr("hf_stream.checkpoint.writer.write_into", slowly)
    thread = threading.Thread(target=writer.write, args=("x", torch.ones(4)))
    thread.start()
    assert writing.wait(30)
    with pytest.raises(CheckpointError, match="1 writes are still under way"):
        writer.close()
    go_on.set()
    thread.join()
    writer.close()
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["x"], torch.ones(4))
