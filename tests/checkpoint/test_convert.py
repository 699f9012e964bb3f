from __future__ import annotations

import importlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import files_of, named_tensors, random_bits, same_bits

from hf_stream import convert, open_checkpoint, plan_conversion, save_checkpoint, verify
from hf_stream.checkpoint import AnyLayout, staging
from hf_stream.errors import CheckpointError, CopyError
from hf_stream.layouts import Layout, Rename

Tensors = Mapping[str, torch.Tensor]


def _source(directory: Path, count: int = 6) -> dict[str, torch.Tensor]:
    tensors = {f"t{n}": random_bits((8, 4), torch.float32, n) for n in range(count)}
    save_checkpoint(tensors, directory, max_shard_size=256)
    return tensors


def _swap(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Two tensors of one shape and dtype change their names."""
    return {{"t0": "t1", "t1": "t0"}.get(name, name): tensor for name, tensor in tensors.items()}


class _StopAfter:
    """Counts bytes, and stops the run like Ctrl-C after some."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.total = 0

    def update(self, n: int) -> None:
        self.left -= n
        self.total += n
        if self.left <= 0:
            raise KeyboardInterrupt


_ENDLESS = 1 << 60


@settings(deadline=None, max_examples=40)
@given(tensors=named_tensors(min_size=1), before=st.integers(1, 200), after=st.integers(1, 200))
def test_converting_is_opening_and_saving(tmp_path_factory: pytest.TempPathFactory, tensors, before, after) -> None:
    top = tmp_path_factory.mktemp("convert")
    save_checkpoint(tensors, top / "a", max_shard_size=before)
    save_checkpoint(open_checkpoint(top / "a"), top / "b", max_shard_size=after)
    assert convert(top / "a", top / "c", max_shard_size=after, verify=True) == top / "c"
    assert files_of(top / "c") == files_of(top / "b")
    assert not verify(top / "c", tensors)
    convert(top / "a", top / "deep/one {x}.safetensors")
    one = load_file(top / "deep/one {x}.safetensors")
    assert all(same_bits(one[name], tensor) for name, tensor in tensors.items())
    assert os.listdir(top / "deep") == ["one {x}.safetensors"]


def test_a_layout_and_a_dtype(tmp_path: Path) -> None:
    tensors = {"q": torch.randn(4, 3), "k": torch.randn(2, 3), "i": torch.arange(3), "z": torch.randn(2).cfloat()}
    save_checkpoint(tensors, tmp_path / "a", metadata={"by": "us"})
    layout = lambda t: {"qk": torch.cat([t["q"], t["k"]]), "i": t["i"], "z": t["z"]}  # noqa: E731
    convert(tmp_path / "a", tmp_path / "b", layout=layout, dtype=torch.bfloat16, verify=True)
    converted = load_file(tmp_path / "b/model.safetensors")
    assert torch.equal(converted["qk"], torch.cat([tensors["q"], tensors["k"]]).bfloat16())
    assert torch.equal(converted["i"], tensors["i"])
    assert torch.equal(converted["z"], tensors["z"])
    assert open_checkpoint(tmp_path / "b").metadata == {"format": "pt", "by": "us"}


@pytest.mark.parametrize("at", [1, 300, 700])
@pytest.mark.parametrize("target", ["new", "there", "one.safetensors"])
def test_an_interrupted_run_is_taken_up(tmp_path: Path, at: int, target: str) -> None:
    tensors = _source(tmp_path / "a")
    save_checkpoint({"old": torch.ones(1)}, tmp_path / "there")
    convert(tmp_path / "a", tmp_path / "wanted", max_shard_size=256)
    stopped = _StopAfter(at)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "a", tmp_path / target, max_shard_size=256, progress=stopped)
    assert verify(tmp_path / "there", {"old": torch.ones(1)}) == verify({}, {})
    rest = _StopAfter(_ENDLESS)
    convert(tmp_path / "a", tmp_path / target, max_shard_size=256, progress=rest)
    if target == "one.safetensors":
        assert not verify(tmp_path / target, tensors)
    else:
        assert rest.total == 768 - (at - 1) // 256 * 256
        assert files_of(tmp_path / target) == files_of(tmp_path / "wanted")
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("change", ["source", "layout", "shards", "resume", "dtype"])
def test_another_conversion_starts_anew(tmp_path: Path, change: str) -> None:
    tensors = _source(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "a", tmp_path / "b", max_shard_size=256, progress=_StopAfter(600))
    options = {"max_shard_size": 256}
    if change == "source":
        tensors["t5"] = tensors["t5"].neg()
        save_checkpoint(tensors, tmp_path / "a", max_shard_size=256)
    elif change == "layout":
        options["layout"] = _swap
        tensors = _swap(tensors)
    elif change == "shards":
        options["max_shard_size"] = 512
    elif change == "resume":
        options["resume"] = False
    else:
        options["dtype"] = torch.float64
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
    bar = _StopAfter(_ENDLESS)
    convert(tmp_path / "a", tmp_path / "b", progress=bar, **options)
    assert bar.total == sum(tensor.nbytes for tensor in tensors.values())
    assert not verify(tmp_path / "b", tensors)


def test_names_are_part_of_what_a_run_was_to_write(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    plans = [plan_conversion(tmp_path / "a", layout=layout) for layout in (None, _swap)]
    assert plans[0].files.shards == plans[1].files.shards
    assert plans[0].fingerprint() != plans[1].fingerprint()


def test_without_resume_an_error_leaves_nothing(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "a", tmp_path / "b", max_shard_size=256, resume=False, progress=_StopAfter(600))
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_a_failed_read_names_the_tensor_and_keeps_what_is_whole(tmp_path: Path) -> None:
    tensors = _source(tmp_path / "a")
    checkpoint = open_checkpoint(tmp_path / "a")
    last = tmp_path / "a/model-00003-of-00003.safetensors"
    content = last.read_bytes()
    os.truncate(last, 100)
    with pytest.raises(CopyError, match=r"'t4'.*model-00003-of-00003\.safetensors"):
        convert(checkpoint, tmp_path / "b", max_shard_size=256)
    assert not (tmp_path / "b").exists()
    last.write_bytes(content)
    convert(tmp_path / "a", tmp_path / "b", max_shard_size=256)
    assert not verify(tmp_path / "b", tensors)


def test_small_files_go_along_and_weights_do_not(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    carried = ["config.json", "tokenizer.model", "1_Pooling/config.json", "README.md", "chat/a/b.jinja"]
    left = ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json"]
    left += [
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        ".gitattributes",
        ".cache/x",
        "x.gguf",
        "sub/w.safetensors",
    ]
    for name in carried + left:
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_text("{}")
    os.mkfifo(tmp_path / "a/pipe")
    (tmp_path / "a/dangling").symlink_to("nowhere")
    (tmp_path / "a/config.json").chmod(0o600)
    convert(tmp_path / "a", tmp_path / "b")
    assert set(files_of(tmp_path / "b")) == {"model.safetensors", *carried}
    assert stat.S_IMODE((tmp_path / "b/config.json").stat().st_mode) == 0o666 & ~_umask()
    convert(tmp_path / "a", tmp_path / "only.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "only.safetensors"}


def test_small_files_go_along_with_an_index_and_stay_behind_with_a_single_file(tmp_path: Path) -> None:
    save_checkpoint({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "a", max_shard_size=16)
    (tmp_path / "a/config.json").write_text('{"dtype": "float32"}')
    convert(tmp_path / "a/model.safetensors.index.json", tmp_path / "b", dtype=torch.float16)
    assert json.loads(files_of(tmp_path / "b").pop("config.json")) == {"dtype": "float16"}
    convert(tmp_path / "a/model-00001-of-00002.safetensors", tmp_path / "c")
    assert set(files_of(tmp_path / "c")) == {"model.safetensors"}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_small_files_of_an_earlier_attempt_do_not_stay(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    for name in ("gone.json", "sub/gone.txt"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "a", tmp_path / "b", max_shard_size=256, progress=_StopAfter(600))
    (tmp_path / "a/gone.json").unlink()
    shutil.rmtree(tmp_path / "a/sub")
    convert(tmp_path / "a", tmp_path / "b", max_shard_size=256)
    assert set(files_of(tmp_path / "b")) == {*(path.name for path in (tmp_path / "a").iterdir())}


def test_the_config_says_what_the_weights_are_now(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    config = {"z": "\N{SNOWMAN}", "dtype": "float32", "text_config": {"torch_dtype": "float32"}}
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    (tmp_path / "a/1_Pooling").mkdir()
    (tmp_path / "a/1_Pooling/config.json").write_text('{"dtype": "x"}')
    convert(tmp_path / "a", tmp_path / "b", dtype=torch.bfloat16)
    text = (tmp_path / "b/config.json").read_text()
    wanted = {**config, "dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}}
    assert text == json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
    assert (tmp_path / "b/1_Pooling/config.json").read_text() == '{"dtype": "x"}'
    convert(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c/config.json").read_bytes() == (tmp_path / "a/config.json").read_bytes()
    (tmp_path / "a/config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json' is not JSON"):
        convert(tmp_path / "a", tmp_path / "d", dtype=torch.bfloat16)
    assert not (tmp_path / "d").exists()


def test_a_destination_inside_the_source_does_not_go_into_itself(tmp_path: Path) -> None:
    tensors = _source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for _ in range(2):
        convert(tmp_path, tmp_path / "out")
        assert set(files_of(tmp_path / "out")) == {"model.safetensors", "config.json"}
    assert not verify(tmp_path / "out", tensors)


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("a", "a"),
        ("a", "link"),
        ("a", "a/../a/"),
        ("a/model.safetensors", "a"),
        ("a/model.safetensors", "a/model.safetensors"),
        ("a", "a/model.safetensors"),
        ("a/model.safetensors", "other.safetensors"),
    ],
)
def test_the_source_is_no_destination(tmp_path: Path, source: str, destination: str) -> None:
    save_checkpoint({"a": torch.ones(4)}, tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "other.safetensors").symlink_to("a/model.safetensors")
    before = files_of(tmp_path / "a")
    with pytest.raises(CheckpointError, match="is where the source is"):
        convert(tmp_path / source, tmp_path / destination, dtype=torch.float16)
    assert files_of(tmp_path / "a") == before


def test_one_file_beside_another_leaves_the_other_alone(tmp_path: Path) -> None:
    save_checkpoint({"a": torch.ones(4)}, tmp_path)
    convert(tmp_path / "model.safetensors", tmp_path / "half.safetensors", dtype=torch.float16)
    assert open_checkpoint(tmp_path / "half.safetensors")["a"].dtype == torch.float16
    assert open_checkpoint(tmp_path / "model.safetensors")["a"].dtype == torch.float32


def test_nothing_to_write_is_an_error(tmp_path: Path) -> None:
    _source(tmp_path / "a")
    with pytest.raises(CheckpointError, match="no tensors are left"):
        convert(tmp_path / "a", tmp_path / "b", layout=lambda _: {})
    assert not (tmp_path / "b").exists()


def test_a_verification_that_fails_leaves_nothing_to_take_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _source(tmp_path / "a")
    module = importlib.import_module("hf_stream.checkpoint.convert")  # the package's name for it is the function's
    write = module.write_into

    def write_wrongly(jobs, **kwargs):
        write(jobs, **kwargs)
        _, region, _ = jobs[0]
        region.storage.write_from(memoryview(b"\xff\xff\xff\x7f"), region.offset + 16)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_into", write_wrongly)
        with pytest.raises(CheckpointError, match=r"'t0' differs first at \[1, 0\]"):
            convert(tmp_path / "a", tmp_path / "b", verify=True)
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    convert(tmp_path / "a", tmp_path / "b", verify=True)


def test_what_an_earlier_run_had_ready_is_verified_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _source(tmp_path / "a")
    save_checkpoint({"old": torch.ones(3)}, tmp_path / "b")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "replace", lambda *_, **__: _StopAfter(0).update(1))
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "b/.hf-stream/files/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(CheckpointError, match="would differ from what was to be written"):
        convert(tmp_path / "a", tmp_path / "b", verify=True)


def test_only_the_bytes_that_are_kept_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting_file) -> None:
    tensors = {f"t{n}": torch.randn(64, 64) for n in range(20)}
    save_file(tensors, tmp_path / "a.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr("hf_stream.checkpoint.weight_files.FileStorage", counting_file)
        checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    (storage,) = checkpoint.storages.values()
    opened = int(storage.read_counts.sum())
    layout = lambda t: {"rows": torch.cat([t["t3"][:2], t["t7"][10:11]])}  # noqa: E731
    plan = plan_conversion(checkpoint, layout=layout)
    assert plan.nbytes_read() == {str(tmp_path / "a.safetensors"): 3 * 256}
    convert(checkpoint, tmp_path / "b", layout=layout)
    assert int(storage.read_counts.sum()) - opened == 3 * 256
    rows = torch.cat([tensors["t3"][:2], tensors["t7"][10:11]])
    assert torch.equal(load_file(tmp_path / "b/model.safetensors")["rows"], rows)


def test_weights_that_stay_behind_are_named(tmp_path, caplog):
    source = tmp_path / "source"
    save_checkpoint({"w": torch.ones(2)}, source)
    (source / "2_Dense").mkdir()
    save_file({"w": torch.ones(2)}, source / "2_Dense" / "model.safetensors")
    convert(source, tmp_path / "out")
    assert "1 other weight files are not converted and stay behind: '2_Dense/model.safetensors'" in caplog.text


class Renamed:
    """A layout that knows about the config."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"new.{name}": tensor for name, tensor in tensors.items()}

    def new_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name != "quantization_config"}


def in_half(names: set[str]) -> AnyLayout:
    return lambda tensors: {name: t.to(torch.float16) if name in names else t for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("layout", "dtype", "wanted"),
    [
        (None, None, {"dtype": "float32", "quantization_config": {"dtype": "int4"}}),
        (in_half({"small"}), None, {"dtype": "float32", "quantization_config": {"dtype": "int4"}}),
        (in_half({"large"}), None, {"dtype": "float16", "quantization_config": {"dtype": "int4"}}),
        (Renamed(), None, {"dtype": "float32"}),
        (Renamed(), torch.bfloat16, {"dtype": "bfloat16"}),
    ],
)
def test_the_config_says_what_most_weights_are_now_and_what_the_layout_says(
    layout: AnyLayout | None, dtype: torch.dtype | None, wanted: dict[str, Any], tmp_path: Path
) -> None:
    tensors = {"large": torch.randn(4, 4), "small": torch.randn(3), "count": torch.zeros(99, dtype=torch.int64)}
    save_checkpoint(tensors, tmp_path / "a")
    written = '{"dtype": "float32",  "quantization_config": {"dtype": "int4"}}'
    (tmp_path / "a/config.json").write_text(written)
    convert(tmp_path / "a", tmp_path / "b", layout=layout, dtype=dtype)
    text = (tmp_path / "b/config.json").read_text()
    assert json.loads(text) == wanted
    assert (text == written) is (json.loads(written) == wanted)


def test_a_config_that_no_one_changes_need_not_be_json(tmp_path: Path) -> None:
    save_checkpoint({"a": torch.randn(2)}, tmp_path / "a")
    (tmp_path / "a/config.json").write_text("{")
    convert(tmp_path / "a", tmp_path / "b", layout=lambda tensors: {"b": tensors["a"]})
    assert (tmp_path / "b/config.json").read_text() == "{"
    with pytest.raises(CheckpointError, match=r"config\.json' is not JSON"):
        convert(tmp_path / "a", tmp_path / "c", layout=Renamed())


def test_what_holds_for_another_layout_stays_behind(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in ("config.json", "hf_stream.json"):
        (tmp_path / name).write_text("{}")
    convert(tmp_path, tmp_path / "same")
    convert(tmp_path, tmp_path / "other", layout=Layout([Rename("a", "b")]))

    assert (tmp_path / "same" / "hf_stream.json").exists()
    assert not (tmp_path / "other" / "hf_stream.json").exists()
    assert (tmp_path / "other" / "config.json").exists()


@pytest.mark.parametrize("name", ["out.pt", "out.bin", "out.pth"])
def test_files_of_torch_save_are_not_written(tmp_path, name):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="which is not written"):
        convert(tmp_path, tmp_path / name)
    assert not (tmp_path / name).exists()
