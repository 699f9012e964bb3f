from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import run
from file_facts import pwned
from safetensors.torch import load_file, save_file
from samples import same_bits
from torch_files import FOLDER, expected, files, records_of, write_records

import hf_stream
from hf_stream import open_checkpoint
from hf_stream.checkpoint.parts import find_parts
from hf_stream.errors import CheckpointError, FormatError
from hf_stream.layouts import Drop, Layout

_FLAT = [
    name
    for name in files("good")
    if not any(part in name for part in ("nested", "list_of", "optimizer", "single", "ordered", "empty_dict"))
]


def _save(path: Path, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, path)
    return tensors


def _holds(checkpoint: hf_stream.Checkpoint, wanted: dict[str, torch.Tensor]) -> bool:
    return list(checkpoint) == list(wanted) and all(
        same_bits(checkpoint[name].materialize(), tensor.contiguous()) for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("name", _FLAT)
def test_state_dicts_open_and_convert(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(FOLDER / name, verify="no_crc32" not in name)
    wanted = load_file(FOLDER / "expected_good" / f"{Path(name).name}.safetensors")
    raw = {fact["expected_name"] for fact in expected(name)["tensors"] if fact["expected_as"] != "tensor"}
    assert sorted(checkpoint) == sorted(wanted)
    for key, lazy in checkpoint.items():
        assert not lazy.requires_grad
        value = lazy.materialize()
        value = value.reshape(-1).view(torch.uint8) if key in raw else value
        assert same_bits(value, wanted[key].reshape(value.shape))
        fact = checkpoint.facts(key)
        assert (fact.nbytes, checkpoint[key]) == (lazy.numel() * lazy.itemsize, lazy)
    assert checkpoint.nbytes == sum(fact.nbytes for fact in map(checkpoint.facts, checkpoint))
    without = Drop("complex128") if "complex128" in checkpoint else None  # which safetensors does not have
    hf_stream.convert(checkpoint, tmp_path / "out", layout=without and Layout([without]), verify=True)
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert converted.keys() == checkpoint.keys() - {"complex128"}
    for key, tensor in converted.items():
        assert same_bits(tensor, checkpoint[key].materialize())


def test_a_tensor_and_a_list_have_names_too(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "a.pt")
    torch.save([torch.ones(1), torch.zeros(2)], tmp_path / "b.pt")
    torch.save({}, tmp_path / "c.pt")
    assert {name: lazy.tolist() for name, lazy in open_checkpoint(tmp_path / "a.pt").items()} == {"value": [1, 1]}
    assert {name: lazy.tolist() for name, lazy in open_checkpoint(tmp_path / "b.pt").items()} == {"0": [1], "1": [0, 0]}
    assert len(open_checkpoint(tmp_path / "c.pt")) == 0


@pytest.fixture
def wrapped(tmp_path: Path) -> Path:
    ema = {"model.w": torch.full((2,), 3.0)}
    state = {"model": {"w": torch.ones(2), "epoch": 3}, "ema": {"fast": ema, 7: [torch.zeros(1)]}, "args": {"lr": 0.1}}
    torch.save(state, tmp_path / "wrapped.pt")
    return tmp_path / "wrapped.pt"


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("model", {"w": [1, 1]}),
        (["model"], {"w": [1, 1]}),
        ("ema/fast", {"model.w": [3, 3]}),
        ("ema.fast", {"model.w": [3, 3]}),
        (("ema", 7), {"0": [0]}),
        ("ema/7", {"0": [0]}),
        ("ema/fast/model.w", {"value": [3, 3]}),
    ],
)
def test_wrapped_state_dicts_are_reached_by_a_key(wrapped: Path, key: object, wanted: object) -> None:
    assert {name: lazy.tolist() for name, lazy in open_checkpoint(wrapped, key=key).items()} == wanted


@pytest.mark.parametrize("key", [None, "", "nothing", "model/nothing", "args", "ema", "args/lr", ["model", "w", "x"]])
def test_without_a_right_key_the_candidates_are_listed(wrapped: Path, key: object) -> None:
    with pytest.raises(CheckpointError, match=r"wrapped\.pt.*'model' \(1 tensors\), 'ema/fast' \(1 tensors\), 'ema/7'"):
        open_checkpoint(wrapped, key=key)


def test_the_only_dict_of_tensors_needs_no_key(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "args": {"lr": 0.1}, "epoch": 3}, tmp_path / "x.pt")
    assert list(open_checkpoint(tmp_path / "x.pt")) == ["w"]
    torch.save({"w": torch.ones(2), "optimizer": {"m": torch.ones(3)}}, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="key="):
        open_checkpoint(tmp_path / "y.pt")
    assert list(open_checkpoint(tmp_path / "y.pt", key="")) == ["w"]
    torch.save({"epoch": 3}, tmp_path / "z.pt")
    with pytest.raises(CheckpointError, match="no dict of tensors"):
        open_checkpoint(tmp_path / "z.pt")


def test_a_number_and_its_text_are_not_two_names(tmp_path: Path) -> None:
    torch.save({0: torch.ones(1), "0": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="two tensors of one name"):
        open_checkpoint(tmp_path / "x.pt")


def test_a_part_that_is_not_wanted_may_hold_what_cannot_be_read(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "masks": {"m": torch.eye(2).to_sparse()}}, tmp_path / "x.pt")
    assert open_checkpoint(tmp_path / "x.pt", key="model")["w"].tolist() == [1, 1]
    with pytest.raises(FormatError, match="'m' is a sparse tensor"):
        open_checkpoint(tmp_path / "x.pt", key="masks")


def test_safetensors_files_have_no_keys(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="key"):
        open_checkpoint(tmp_path / "x.safetensors", key="model")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_every_suffix_of_torch_save(tmp_path: Path, suffix: str) -> None:
    wanted = _save(tmp_path / f"x{suffix}", w=torch.ones(2))
    assert _holds(open_checkpoint(tmp_path / f"x{suffix}"), wanted)


def _index(path: Path, weight_map: dict[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_directories_are_searched_as_transformers_does(tmp_path: Path) -> None:
    places: list[tuple[str, Callable[[], None]]] = [
        ("bin index", lambda: _index(tmp_path / "pytorch_model.bin.index.json", {"w": "part.bin"})),
        ("bin", lambda: torch.save({"w": torch.tensor(2.0)}, tmp_path / "pytorch_model.bin")),
        ("index", lambda: _index(tmp_path / "model.safetensors.index.json", {"w": "part.safetensors"})),
        ("single", lambda: save_file({"w": torch.tensor(4.0)}, tmp_path / "model.safetensors")),
    ]
    torch.save({"w": torch.tensor(1.0)}, tmp_path / "part.bin")
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    save_file({"w": torch.tensor(3.0)}, tmp_path / "part.safetensors")
    for number, (_, add) in enumerate(places, 1):
        add()
        assert open_checkpoint(tmp_path)["w"].item() == number


@pytest.mark.parametrize("escape", ["../out.bin", "/tmp/out.bin", "inner/../../out.bin", "..\\out.bin"])
def test_an_index_cannot_leave_its_directory(tmp_path: Path, escape: str) -> None:
    _save(tmp_path / "out.bin", w=torch.ones(1))
    (tmp_path / "in").mkdir()
    _index(tmp_path / "in" / "pytorch_model.bin.index.json", {"w": escape})
    for source in (tmp_path / "in", tmp_path / "in" / "pytorch_model.bin.index.json"):
        with pytest.raises(FormatError, match="inside the directory"):
            open_checkpoint(source)


def test_parts_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"run2/part-{number}.pt" for number in (0, 1, 2, 9, 10, 11)] + ["run10/part-0.pt"]
    for name in reversed(names):
        _save(tmp_path / name, w=torch.tensor(names.index(name)))
    assert find_parts(str(tmp_path / "run*" / "part-*.pt")) == [str(tmp_path / name) for name in names]
    checkpoint = open_checkpoint(tmp_path / "run*" / "part-*.pt")
    assert list(checkpoint) == [f"w.part_{number}" for number in range(7)]
    assert [lazy.item() for lazy in checkpoint.values()] == list(range(7))
    assert checkpoint.file_of("w.part_4") == "run2/part-10.pt"


def test_parts_without_names_in_common_are_one_checkpoint(tmp_path: Path) -> None:
    wanted = _save(tmp_path / "a-1.pth", x=torch.ones(2)) | _save(tmp_path / "a-2.pth", y=torch.zeros(3))
    assert _holds(open_checkpoint(tmp_path / "a-*.pth"), wanted)
    assert _holds(open_checkpoint(tmp_path / "a-[2].pth"), {"y": wanted["y"]})
    save_file({"z": torch.ones(1)}, tmp_path / "a-3.safetensors")
    assert list(open_checkpoint(str(tmp_path / "a-*"))) == ["x", "y", "z"]


def test_names_of_one_part_alone_are_numbered_like_the_others(tmp_path: Path) -> None:
    for number, extra in ((0, {}), (1, {"only": torch.ones(1)})):
        torch.save({"model": {"w": torch.ones(1), **extra}}, tmp_path / f"p{number}.pt")
    assert list(open_checkpoint(tmp_path / "p*.pt")) == ["w.part_0", "w.part_1", "only.part_1"]


def test_a_pattern_that_finds_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="finds no file"):
        open_checkpoint(tmp_path / "*.pt")


@pytest.mark.parametrize("name", files("hostile"))
def test_hostile_files_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match=Path(name).name):
        open_checkpoint(FOLDER / name)
    assert not pwned()


def test_twenty_thousand_tensors_read_no_data(tmp_path: Path, monkeypatch, counting_file) -> None:
    torch.save({f"model.layers.{n}.weight": torch.zeros(4, 8) for n in range(20_000)}, tmp_path / "x.pt")
    monkeypatch.setattr("hf_stream.checkpoint.torch_file.FileStorage", counting_file)
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    (file,) = checkpoint.storages.values()
    assert len(checkpoint) == 20_000
    for name in list(checkpoint)[::100]:
        base = checkpoint[name]._source.base
        assert not file.read_counts[base : base + 128].any()
    assert int(file.read_counts.max()) <= 2


def test_convert_carries_what_lies_beside_and_writes_each_tied_name(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    _save(tmp_path / "in" / "pytorch_model.bin", a=shared, b=shared, c=shared.t())
    (tmp_path / "in" / "config.json").write_text("{}")
    result = run("convert", tmp_path / "in", tmp_path / "out", "--verify")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        "a": shared.tolist(),
        "b": shared.tolist(),
        "c": shared.t().tolist(),
    }


def test_the_command_line_reads_files_of_torch_save(wrapped: Path, tmp_path: Path) -> None:
    shown = run("inspect", wrapped, "--key", "model")
    assert "w     F32    [2]      8 B  wrapped.pt" in shown.stdout
    refused = run("convert", wrapped, tmp_path / "out")
    assert refused.exit_code == 2
    assert "--key" in refused.stderr
    assert run("convert", wrapped, tmp_path / "out", "--key", "ema/fast").exit_code == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["model.w"].tolist() == [3, 3]
    assert run("verify", wrapped, tmp_path / "out", "--key", "ema/fast").exit_code == 0
    assert run("plan", wrapped, "--key", "model").exit_code == 0


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_types_that_safetensors_does_not_have_are_named(tmp_path: Path) -> None:
    _save(tmp_path / "x.pt", half=torch.zeros(2, dtype=torch.complex32), w=torch.ones(1))
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert checkpoint.facts("half").dtype == "complex32"
    with pytest.raises(FormatError, match="'half'"):
        hf_stream.convert(checkpoint, tmp_path / "out")


def test_files_that_were_written_anew_without_marks_read_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = _save(tmp_path / "x.pt", w=torch.randn(50))
    records = {name: content for name, content in records_of(tmp_path / "x.pt").items() if not name.startswith(".")}
    with caplog.at_level(logging.WARNING):
        assert _holds(open_checkpoint(write_records(tmp_path / "y.pt", records), verify=True), wanted)
    assert not caplog.records
