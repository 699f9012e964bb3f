"""Folders of one TorchScript archive for each tensor: written, resumed, replaced, and opened."""

from __future__ import annotations

import logging
import os
import resource
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import partitions
from part_files import DATA, manifest, sha256
from safetensors.torch import save_file
from samples import files_of, random_bits, same_bits

import hf_stream
from hf_stream.checkpoint import archives
from hf_stream.errors import CheckpointError, CopyError, FormatError, LayoutError
from hf_stream.layouts import Layout, Rename, swift_transformer

SOURCE = DATA / "opt_h2" / "input" / "parts2" / "*.pt"
ORIGINAL = DATA / "opt_h2" / "original_output_fp16"


def written(directory: Path) -> dict[str, str]:
    return {name: sha256(tensor) for name, tensor in partitions(directory.glob("*.pt")).items()}


def wanted(case: str, dtype: str) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in manifest(case)["outputs"][dtype].items()}


@pytest.mark.parametrize(
    ("case", "files"),
    [
        ("opt_h2", "input/single.pt"),
        ("opt_h2", "input/parts16/*.pt"),
        ("opt_h2", "hf"),
        ("llama2_gqa12_4", "input/parts4/*.pth"),
        ("cast_special", "input/single.pt"),
    ],
)
def test_the_files_are_those_of_the_original(case: str, files: str, tmp_path: Path) -> None:
    for dtype in manifest(case)["outputs"]:
        out = tmp_path / dtype
        torch_dtype = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

        hf_stream.convert(DATA / case / files, out, layout=swift_transformer(), dtype=torch_dtype, verify=True)

        assert written(out) == wanted(case, dtype)
        for file in out.glob("*.pt"):
            with zipfile.ZipFile(file) as archive:
                assert archive.testzip() is None, file


def test_the_original_s_own_files_open_as_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = hf_stream.open_checkpoint(ORIGINAL, verify=True)

    assert {f"{name}.pt": sha256(t.materialize()) for name, t in checkpoint.items()} == wanted("opt_h2", "fp16")
    assert checkpoint.file_of("decoder.layers.0.fc1.bias.tp_3") == "decoder.layers.0.fc1.bias.tp_3.pt"
    assert checkpoint.nbytes == sum(t.numel() * t.itemsize for t in checkpoint.values())
    hf_stream.convert(SOURCE, tmp_path / "out", layout=swift_transformer(), dtype=torch.float16)
    assert not hf_stream.verify(checkpoint, tmp_path / "out")


def test_the_same_partitions_as_safetensors(tmp_path: Path) -> None:
    layout = swift_transformer()
    hf_stream.convert(SOURCE, tmp_path / "many", layout=layout)
    hf_stream.convert(SOURCE, tmp_path / "few", layout=layout, format="safetensors", max_shard_size=300_000)
    hf_stream.convert(SOURCE, tmp_path / "one.safetensors", layout=layout)

    assert {path.suffix for path in (tmp_path / "few").iterdir()} == {".safetensors", ".json"}
    assert not hf_stream.verify(tmp_path / "many", tmp_path / "few")
    assert not hf_stream.verify(tmp_path / "many", tmp_path / "one.safetensors")


def test_any_layout_may_be_written_so(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = {"up.weight": torch.arange(6.0).reshape(2, 3), "up.bias": torch.arange(2)}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text("{}")

    hf_stream.convert(source, tmp_path / "out", format="torchscript")
    hf_stream.convert(source, tmp_path / "again", layout=swift_like(), format=None)

    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "up.bias.pt", "up.weight.pt"]
    assert os.listdir(tmp_path / "again").count("model.safetensors") == 1
    opened = hf_stream.open_checkpoint(tmp_path / "out")
    assert all(same_bits(opened[name].materialize(), tensor) for name, tensor in tensors.items())


def swift_like() -> Layout:
    return Layout([Rename("up.weight", "down.weight")])


def test_names_that_are_no_files_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_file({"up": torch.ones(2)}, tmp_path / "a.safetensors")

    with pytest.raises(FormatError, match="'up' cannot be the name of a TorchScript file"):
        hf_stream.convert(tmp_path / "a.safetensors", tmp_path / "out", format="torchscript")

    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_names_that_differ_in_case_alone_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2), "A.weight": torch.ones(2)}, tmp_path / "a.safetensors")

    with pytest.raises(FormatError, match="differ in case alone"):
        hf_stream.convert(tmp_path / "a.safetensors", tmp_path / "out", format="torchscript")


@pytest.mark.parametrize(
    ("destination", "format", "message"),
    [
        ("one.safetensors", "torchscript", r"is one safetensors file; give a directory"),
        ("out", "gguf", r"format 'gguf' is not known; choose 'safetensors' or 'torchscript'"),
    ],
)
def test_formats_that_cannot_be(destination: str, format: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        hf_stream.convert(SOURCE, tmp_path / destination, layout=swift_transformer(), format=format)

    assert not os.listdir(tmp_path)


def test_a_model_that_cannot_be_divided_leaves_nothing_behind(tmp_path: Path) -> None:
    """The original writes all files up to that of the first ffn weight."""
    model = torch.load(DATA / "opt_h2" / "input" / "single.pt")["model"]
    for name, tensor in model.items():
        if "fc1" in name or "fc2.weight" in name:
            model[name] = tensor[..., :20] if "fc2" in name else tensor[:20]
    torch.save(model, tmp_path / "odd.pt")

    with pytest.raises(LayoutError, match=r"fc1.weight' of shape \[20, 128\] cannot be cut into 8 equal pieces"):
        hf_stream.convert(tmp_path / "odd.pt", tmp_path / "out", layout=swift_transformer())

    assert os.listdir(tmp_path) == ["odd.pt"]


class Stops:
    """Raises once so many bytes have been written."""

    def __init__(self, nbytes: int):
        self.left = nbytes

    def update(self, n: int) -> None:
        self.left -= n
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("exists", [False, True])
def test_a_run_that_was_cut_short_goes_on(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hf_stream.checkpoint.convert"], "_BATCH_NBYTES", 50_000)
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    options: dict[str, Any] = {"layout": swift_transformer(), "dtype": torch.float16}
    with pytest.raises(KeyboardInterrupt):
        hf_stream.convert(SOURCE, out, **options, progress=Stops(200_000))
    staged = (out / ".hf-stream" if exists else tmp_path / ".out.hf-stream") / "files"
    kept = {path.name: path.stat().st_ino for path in staged.iterdir()}
    assert 10 < len(kept) < len(wanted("opt_h2", "fp16"))
    assert not list(out.glob("*.pt"))

    hf_stream.convert(SOURCE, out, **options)

    assert written(out) == wanted("opt_h2", "fp16")
    assert {name: (out / name).stat().st_ino for name in kept} == kept
    assert not list(tmp_path.rglob("*.hf-stream"))


def test_old_weights_of_any_kind_are_replaced_and_nothing_else(tmp_path: Path) -> None:
    save_file({"old": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"step": 3}, tmp_path / "optimizer.pt")
    hf_stream.convert(DATA / "llama2_gqa12_4" / "input" / "single.pt", tmp_path / "old", layout=swift_transformer())
    for file in (tmp_path / "old").iterdir():
        file.rename(tmp_path / file.name)

    hf_stream.convert(SOURCE, tmp_path, layout=swift_transformer(), dtype=torch.float16)

    (tmp_path / "old").rmdir()
    assert set(os.listdir(tmp_path)) == {*wanted("opt_h2", "fp16"), "optimizer.pt"}
    assert len(hf_stream.open_checkpoint(tmp_path)) == len(wanted("opt_h2", "fp16"))


def test_equal_sources_make_equal_files(tmp_path: Path) -> None:
    for name in ("one", "other"):
        hf_stream.convert(SOURCE, tmp_path / name, layout=swift_transformer())

    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")


def test_verify_finds_what_was_written_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = archives._close

    def damaged(item: Any) -> None:
        storage, archive = item
        if "fc1.weight.tp_2" in storage.name:
            storage.write_from(memoryview(b"\x55"), archive.tensor.start + 5)
        close(item)

    monkeypatch.setattr(archives, "_close", damaged)

    with pytest.raises(CheckpointError, match=r"fc1.weight.tp_2' differs first at \[0, 1\]"):
        hf_stream.convert(SOURCE, tmp_path / "out", layout=swift_transformer(), verify=True)

    assert not os.listdir(tmp_path)


def test_the_checksum_is_compared_on_request(tmp_path: Path) -> None:
    hf_stream.convert(SOURCE, tmp_path / "out", layout=swift_transformer())
    file = tmp_path / "out" / "decoder.layers.1.fc2.weight.tp_4.pt"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)

    assert len(hf_stream.open_checkpoint(tmp_path / "out")) == 113
    with pytest.raises(FormatError, match=r"fc2.weight.tp_4.pt': the CRC-32 of record"):
        hf_stream.open_checkpoint(tmp_path / "out", verify=True)


def test_checksums_of_tensors_larger_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    save_file({"a.weight": random_bits((700_001,), torch.uint8)}, tmp_path / "a.safetensors")

    hf_stream.convert(tmp_path / "a.safetensors", tmp_path / "out", format="torchscript")

    with zipfile.ZipFile(tmp_path / "out" / "a.weight.pt") as archive:
        assert archive.testzip() is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_stream.convert(SOURCE, tmp_path / "out", layout=swift_transformer())
    return tmp_path / "out"


def _lose(folder: Path) -> None:
    (folder / "decoder.layers.1.fc1.bias.tp_6.pt").unlink()


def _replace(folder: Path) -> None:
    torch.save({"weight": torch.ones(2)}, folder / "decoder.layer_norm.weight.pt")


def _cut(folder: Path) -> None:
    file = folder / "decoder.layer_norm.bias.pt"
    file.write_bytes(file.read_bytes()[:-1])


def _rename(folder: Path) -> None:
    os.replace(folder / "decoder.layer_norm.bias.pt", folder / "decoder.layer_norm.weight.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose, r"has 8 partitions of each tensor, but of 'decoder.layers.1.fc1.bias' number 6 is missing"),
        (_replace, r"holds 'weight'; a TorchScript archive with the plain tensor 'decoder.layer_norm.weight' alone"),
        (_cut, r"does not end with the end of a zip directory"),
        (_rename, r"holds 'decoder.layer_norm.bias'; a TorchScript archive with the plain tensor"),
    ],
)
def test_folders_that_are_not_whole_are_refused(damage: Callable[[Path], None], message: str, folder: Path) -> None:
    damage(folder)

    with pytest.raises((CheckpointError, FormatError), match=message):
        hf_stream.open_checkpoint(folder)


def test_other_files_beside_partitions_are_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"step": 3}, folder / "optimizer.pt")
    (folder / "config.json").write_text('{"num_attention_heads": 2}')

    hf_stream.convert(folder, folder.with_name("hf"), layout=swift_transformer().inverse)

    assert sorted(os.listdir(folder.with_name("hf"))) == ["config.json", "model.safetensors"]
    assert "1 other weight files are not converted and stay behind: 'optimizer.pt'" in caplog.text


def test_a_file_that_is_replaced_meanwhile_is_not_read(folder: Path) -> None:
    checkpoint = hf_stream.open_checkpoint(folder)
    name = "decoder.layer_norm.weight"
    file = folder / f"{name}.pt"
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    os.replace(other, file)

    with pytest.raises(CopyError, match="was replaced or changed while it was in use"):
        checkpoint[name].materialize()


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_there_may_be_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    with few_descriptors(20):
        hf_stream.convert(SOURCE, tmp_path / "out", layout=swift_transformer(), verify=True)
        hf_stream.convert(tmp_path / "out", tmp_path / "hf", layout=swift_transformer().inverse)

    assert len(os.listdir(tmp_path / "out")) == 113
    assert hf_stream.open_checkpoint(tmp_path / "hf")


@pytest.mark.parametrize(
    ("options", "layout", "messages"),
    [
        (
            {"dtype": torch.bfloat16},
            swift_transformer(),
            ["float16 and float32 only, and torch.bfloat16", "the heads do not divide by 8"],
        ),
        ({"dtype": torch.float16}, swift_transformer(2), ["loads 8 partitions, and 2 are to be written"]),
        ({"dtype": torch.float16}, swift_transformer(8, heads=16), []),
        ({}, swift_transformer(8, heads=16), []),
        ({"dtype": torch.bfloat16, "format": "safetensors"}, swift_transformer(2), []),
    ],
)
def test_what_the_loader_of_swift_transformer_does_not_take_is_said(
    options: Any, layout: Any, messages: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        hf_stream.convert(SOURCE, tmp_path / "out", layout=layout, **options)

    assert len(caplog.messages) == len(messages)
    for said, message in zip(caplog.messages, messages, strict=True):
        assert message in said
