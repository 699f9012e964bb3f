"""What is no regular file, or too large, is refused before anything is read or waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from file_facts import open_descriptors

import hf_stream
from hf_stream import CheckpointError
from hf_stream.formats import regular_files
from hf_stream.formats.regular_files import open_regular, read_json_object, read_small


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _socket,
    "a directory": os.mkdir,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_only_regular_files_are_opened(kind: str, flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    KINDS[kind](path)
    before = open_descriptors()
    with pytest.raises(CheckpointError, match=f"x' is {kind} and not a regular file"):
        open_regular(path, flags)
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "file", ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"]
)
def test_a_checkpoint_with_another_kind_of_file_is_refused_at_once(
    kind: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if file.startswith("model"):
        hf_stream.save_checkpoint({"a": torch.ones(9), "b": torch.ones(9)}, tmp_path, max_shard_size=36)
        (tmp_path / file).unlink()
    KINDS[kind](tmp_path / file)
    for source in (tmp_path, tmp_path / file):
        with pytest.raises(CheckpointError, match=r"regular file|holds no|is neither"):
            hf_stream.open_checkpoint(source)


def test_a_link_to_a_regular_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_small(tmp_path / "link") == b"abc"


def test_what_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, regular_files.MAX_JSON_NBYTES + 1)
    with pytest.raises(CheckpointError, match=r"index\.json' has 100000001 bytes, the limit is 100000000"):
        hf_stream.open_checkpoint(tmp_path)
    os.truncate(path, 10)
    assert read_small(path, 10) == bytes(10)
    with pytest.raises(CheckpointError, match="has 10 bytes, the limit is 9"):
        read_small(path, 9)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b'{"a": ' * 100_000, "nests deeper than can be followed"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b"", "is not JSON"),
        (b"[1]", "must hold a JSON object, got list"),
    ],
)
def test_what_is_no_json_object_is_an_error_in_words(content: bytes, fact: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json' {fact}"):
        read_json_object(tmp_path / "config.json")
