"""Tensors that show some of their elements more than once, and others that share memory in odd ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from memory_peaks import in_fresh_process
from safetensors.torch import load_file
from torch_files import write_records

import hf_stream
from hf_stream.errors import FormatError
from hf_stream.formats.budget import MIN_TAKEN

LIMIT = f"the limit for a file of .* is {MIN_TAKEN}"


@pytest.mark.parametrize("zipped", [True, False])
def test_expanded_tensors_stay_expanded(tmp_path: Path, zipped: bool) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    state = {
        "mask": torch.ones(1, 1).expand(1000, 2000),
        "w": w,
        "wide": w[1, :1].expand(7, 5),
        "rows": w[:, None].expand(3, 2, 4),
    }
    path = tmp_path / "x.pt"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    wanted = torch.load(path, weights_only=True)
    hf_stream.save_nested(hf_stream.open_nested(path), tmp_path / "lazy.safetensors")
    hf_stream.save_nested(state, tmp_path / "real.safetensors")
    assert {name: tensor.shape for name, tensor in load_file(tmp_path / "lazy.safetensors").items()} == {
        "mask": (1,),
        "w": (3, 4),
    }
    for file in (path, tmp_path / "lazy.safetensors", tmp_path / "real.safetensors"):
        loaded = hf_stream.load_nested(file)
        for name, tensor in wanted.items():
            assert loaded[name].equal(tensor), name
            assert loaded[name].stride() == tensor.stride(), name
        assert loaded["mask"].untyped_storage().nbytes() == 4
        loaded["w"].fill_(7)
        assert bool((loaded["wide"] == 7).all())


@pytest.mark.parametrize("names", [1, 300])
def test_tensors_that_come_to_far_more_than_the_file_are_refused(tmp_path: Path, names: int) -> None:
    path = tmp_path / "x.pt"
    torch.save({f"w{n}": torch.ones(1).expand((1 << 26) // names) for n in range(names)}, path)
    out = tmp_path / "out"
    for way in (
        lambda: hf_stream.open_checkpoint(path),
        lambda: hf_stream.open_nested(path),
        lambda: hf_stream.load_nested(path),
        lambda: hf_stream.convert(path, out),
    ):
        with pytest.raises(FormatError, match=rf"x\.pt.*'w\d+' of torch.float32 and size .*{LIMIT}.*clone\(\)"):
            way()
    assert not out.exists()


def test_views_in_a_nested_state_have_the_same_limit(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    hf_stream.save_nested({"w": torch.ones(1).expand(1 << 30)}, path)
    assert path.stat().st_size < 1000
    for read in (hf_stream.open_nested, hf_stream.load_nested):
        with pytest.raises(FormatError, match=r"s\.safetensors.*'w'.*the limit for files"):
            read(path)


def test_small_expanded_tensors_are_written_as_their_values(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(3, 4)}, tmp_path / "x.pt")
    hf_stream.convert(tmp_path / "x.pt", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].equal(torch.ones(3, 4))


W = torch.arange(24.0).reshape(4, 6)
C = torch.complex(W, -W)
OVERLAPS = {
    "turned": [W.T, W.diagonal()],
    "rows": [W[1:3], W[2:], W],
    "columns": [W[:, :4], W[:, 2:]],
    "parts": [W[1:3, 1:3], W[2:4, 2:4]],
    "steps": [W.view(-1)[::2], W.view(-1)[::3], W.view(-1)[1::5]],
    "windows": [W.view(-1).unfold(0, 4, 2), W[0]],
    "itself": [W.view(-1).as_strided((5, 4), (2, 1)), W.view(-1).as_strided((3, 3), (1, 1), 20 - 4)],
    "expanded": [W[:1].expand(5, 6), W[1, 2].expand(3, 2), W],
    "parameters": [torch.nn.Parameter(W), torch.nn.Parameter(W[1:]), W[0]],
    "empty": [W[4:], W[:, :0], W],
    "signs": [C.conj(), C.T.conj(), C],
    "one in another's middle": [W[1, 2:4], W[1]],
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlapping_views_load_from_files_of_both_formats(tmp_path: Path, kind: str, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    torch.save(OVERLAPS[kind], path, _use_new_zipfile_serialization=zipped)
    wanted = torch.load(path, weights_only=True)
    for found in (
        hf_stream.load_nested(path),
        hf_stream.materialize(hf_stream.open_nested(path)),
        list(hf_stream.materialize(hf_stream.open_checkpoint(path)).values()),
        hf_stream.load_nested(hf_stream.save_nested(hf_stream.open_nested(path), tmp_path / "s.safetensors")),
    ):
        for ours, torchs in zip(found, wanted, strict=True):
            assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
            assert torch.equal(ours, torchs.detach())


_OVERLAPPING = """
import resource, sys
from pathlib import Path
import torch
import hf_stream
resource.setrlimit(resource.RLIMIT_CPU, (40, 40))
folder = Path(sys.argv[1])
w = torch.zeros(30_000)
state = [w[i:i + 9_000:3 - i % 2] for i in range(20_000)]
torch.save([w.clone()] + [torch.zeros(20_000_000)] + state, folder / "x.pt")
hf_stream.save_nested(hf_stream.open_nested(folder / "x.pt")[2:2000], folder / "s.safetensors")
state = [w[i % 3::3][: 9_000] if i < 3 else w[i:i + 2] for i in range(20_000)]
try:
    hf_stream.save_nested(state, folder / "t.safetensors")
except hf_stream.errors.CheckpointError as error:
    print("overlap" in str(error))
"""


def test_twenty_thousand_overlapping_views_take_seconds(tmp_path: Path) -> None:
    assert in_fresh_process(_OVERLAPPING, tmp_path).strip() == "True"


def test_nested_modules_do_not_make_long_names(tmp_path: Path) -> None:
    level = b"c__torch__\nM\n)\x81}(X\x01\x00\x00\x00tK\x01h\x01"
    name = b"X\xf4\x01\x00\x00" + b"a" * 500
    data = b"\x80\x02c__torch__\nM\n)\x81}(" + name + b"q\x01" + level * 20_000 + b"N" + b"ub" * 20_000 + b"ub."
    records = {"data.pkl": data, "constants.pkl": b"\x80\x02).", "byteorder": b"little", "version": b"3\n"}
    path = write_records(tmp_path / "x.pt", records)
    with pytest.raises(FormatError, match=r"x\.pt.*larger than"):
        hf_stream.open_checkpoint(path)


def test_tied_weights_are_no_expanded_ones(tmp_path: Path) -> None:
    w = torch.ones(300, 1000)
    torch.save({f"layers.{n}.w": w.detach() for n in range(101)}, tmp_path / "x.pt")
    checkpoint = hf_stream.open_checkpoint(tmp_path / "x.pt")
    assert len(checkpoint) == 101
    assert checkpoint["layers.100.w"].materialize().equal(w)
