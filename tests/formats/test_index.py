"""The index is written as transformers writes it, and read only if it stays inside its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2Model

from hf_stream.errors import FormatError
from hf_stream.formats import SAFE_WEIGHTS_INDEX, WeightIndex, encode_index, read_index


def test_bytes_are_those_that_save_pretrained_writes(tmp_path: Path) -> None:
    model = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=32, n_positions=16))
    model.save_pretrained(tmp_path, max_shard_size="2KB", variant="fp16")
    path = tmp_path / "model.safetensors.index.fp16.json"
    index = read_index(path)
    assert set(index.weight_map) == set(model.state_dict())
    assert set(index.weight_map.values()) == {file.name for file in tmp_path.glob("*.safetensors")}
    assert index.metadata["total_size"] == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert encode_index(index.weight_map, index.metadata) == path.read_bytes()
    reverse = dict(reversed(index.weight_map.items()))
    assert encode_index(reverse, dict(reversed(index.metadata.items()))) == path.read_bytes()


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FILES = st.text("abc-.0", min_size=1, max_size=8).map(lambda stem: f"{stem}.safetensors")


@given(weight_map=st.dictionaries(NAMES, FILES), metadata=st.dictionaries(NAMES, st.integers() | NAMES))
def test_written_index_is_read_back(
    weight_map: dict[str, str], metadata: dict[str, int | str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / SAFE_WEIGHTS_INDEX
    path.write_bytes(encode_index(weight_map, metadata))
    assert read_index(path) == WeightIndex(weight_map, metadata)


def write(directory: Path, text: str | bytes) -> Path:
    path = directory / SAFE_WEIGHTS_INDEX
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    "file_name", ["a.safetensors", "sub/a.safetensors", "./a", "a..b", "..a", "a b", "\u00fc", "a//b"]
)
def test_file_names_inside_the_directory_are_accepted(file_name: str, tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"metadata": {}, "weight_map": {"x": file_name}}))
    assert read_index(path).weight_map == {"x": file_name}
    assert (tmp_path / file_name).resolve().is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "file_name",
    ["", ".", "..", "/a", "//a", "../a", "a/../../b", "a/..", "a/", "a/.", "a\\b", "..\\a", "C:a", "C:/a", "a\0b"],
)
def test_file_names_that_leave_the_directory_are_refused(file_name: str, tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"weight_map": {"x": "a.safetensors", "y": file_name}}))
    with pytest.raises(FormatError, match=r"index\.json': file of tensor 'y' is .*, not a file name inside"):
        read_index(path)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (b"\xff", "not JSON in UTF-8"),
        ("", "not JSON"),
        ("\ufeff{}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no object 'weight_map'"),
        ("{}", "no object 'weight_map'"),
        ('{"weight_map":["a"]}', "no object 'weight_map'"),
        ('{"weight_map":{"x":1}}', "file of tensor 'x' is not a string"),
        ('{"weight_map":{"x":null}}', "file of tensor 'x' is not a string"),
        ('{"weight_map":{"x":"a","x":"b"}}', "'x' is repeated"),
        ('{"weight_map":{},"weight_map":{}}', "'weight_map' is repeated"),
        ('{"weight_map":{},"metadata":null}', "'metadata' of the index is not an object"),
    ],
)
def test_what_is_no_index_is_refused(text: str | bytes, fact: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(FormatError, match=f"{path}.*{fact}.*The index is damaged"):
        read_index(path)


def test_index_without_metadata_is_accepted(tmp_path: Path) -> None:
    assert read_index(write(tmp_path, '{"weight_map":{"x":"a"}}')) == WeightIndex({"x": "a"}, {})


def test_default_metadata_is_empty() -> None:
    assert json.loads(encode_index({"x": "a"})) == {"metadata": {}, "weight_map": {"x": "a"}}
