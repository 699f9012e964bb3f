"""Shards are those of huggingface_hub, and linear in the number of tensors."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization._base import parse_size_to_int, split_state_dict_into_shards_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import _add_variant

from hf_stream.errors import ArgumentError, FormatError
from hf_stream.formats import (
    SAFE_WEIGHTS,
    SAFE_WEIGHTS_INDEX,
    add_variant,
    shard_pattern,
    split_into_shards,
)
from hf_stream.utils.sizes import parse_size

TENSORS = st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 4)), max_size=20).map(
    lambda tensors: {f"t{number}": tensor for number, tensor in enumerate(tensors)}
)


@settings(max_examples=500)
@given(tensors=TENSORS, limit=st.integers(1, 30), variant=st.none() | st.just("fp16"))
def test_split_is_that_of_huggingface_hub(
    tensors: dict[str, tuple[int, int | None]], limit: int, variant: str | None
) -> None:
    pattern = shard_pattern(add_variant(SAFE_WEIGHTS, variant))
    wanted = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor[0],
        get_storage_id=lambda tensor: tensor[1],
        filename_pattern=pattern,
        max_shard_size=limit,
    )
    sizes = {name: size for name, (size, _) in tensors.items()}
    groups = {name: group for name, (_, group) in tensors.items() if group is not None or len(name) > 2}
    got = split_into_shards(sizes, limit, pattern, groups)
    assert list(got.filename_to_tensors.items()) == list(wanted.filename_to_tensors.items())
    assert list(got.tensor_to_filename.items()) == list(wanted.tensor_to_filename.items())
    assert got.metadata == wanted.metadata
    assert got.is_sharded == wanted.is_sharded


def test_split_of_real_tensors_with_shared_storage() -> None:
    wide = torch.zeros(600)
    state = {"a": wide, "b": torch.zeros(300), "c": wide[:], "d": torch.zeros(2000), "e": torch.zeros(100)}
    wanted = split_torch_state_dict_into_shards(state, max_shard_size="3KB")
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in state.items()}
    groups = {name: tensor.untyped_storage().data_ptr() for name, tensor in state.items()}
    got = split_into_shards(sizes, "3KB", groups=groups)
    assert got.filename_to_tensors == wanted.filename_to_tensors
    assert got.tensor_to_filename["c"] == got.tensor_to_filename["a"] == "model-00001-of-00003.safetensors"


SIZES = ["5GB", "5gb", " 5 GB ", "1.5MB", "1e3KB", "1_0KB", "0TB", "-5GB", ".5KB", "5TB"]
NO_SIZES = ["", "5", "5B", "GB", "5 G B", "5 gigabytes", "xGB", "5GB5", "infGB", "nanKB", "1e999TB", "0x5GB", "5,0GB"]


@pytest.mark.parametrize("text", SIZES)
def test_sizes_are_read_as_by_huggingface_hub(text: str) -> None:
    assert parse_size(text) == parse_size_to_int(text)


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size_is_refused_as_by_huggingface_hub(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parse_size_to_int(text)
    with pytest.raises(ArgumentError, match=r"size '.*': .*Write it like '5GB'\."):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GiB", 5 << 30), (" 1.5 kib", 1536), ("1MIB", 1 << 20), ("2TiB", 2 << 40), ("1e3KiB", 1024000)],
)
def test_powers_of_1024_have_units_of_their_own(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_empty_input_makes_no_shard() -> None:
    assert split_into_shards({}, 10).filename_to_tensors == split_torch_state_dict_into_shards({}).filename_to_tensors
    assert not split_into_shards({}, 10).is_sharded


def test_pattern_without_a_place_for_the_number_is_refused() -> None:
    with pytest.raises(FormatError, match=r"pattern 'model\.safetensors' gives all shards one name"):
        split_into_shards({"a": 1}, 10, pattern="model.safetensors")


@pytest.mark.parametrize("variant", [None, "fp16", "a.b"])
@pytest.mark.parametrize("file_name", [SAFE_WEIGHTS, SAFE_WEIGHTS_INDEX])
def test_variants_are_named_as_by_transformers(file_name: str, variant: str | None) -> None:
    assert add_variant(file_name, variant) == _add_variant(file_name, variant)


def test_names_of_a_sharded_variant() -> None:
    pattern = shard_pattern(add_variant(SAFE_WEIGHTS, "fp16"))
    assert list(split_into_shards({"a": 1, "b": 1}, 1, pattern).filename_to_tensors) == [
        "model.fp16-00001-of-00002.safetensors",
        "model.fp16-00002-of-00002.safetensors",
    ]


def test_work_grows_linearly_with_the_number_of_tensors() -> None:
    # Counted, not timed: lines executed for 1,000 and 8,000 tensors, each in a shard of its own, half of them shared.
    def lines(count: int) -> int:
        counted = 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal counted
            counted += event == "line"
            return trace

        sizes = dict.fromkeys(map(str, range(count)), 1)
        groups = {name: int(name) // 2 for name in sizes}
        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            split = split_into_shards(sizes, 1, groups=groups)
        finally:
            sys.settrace(before)
        assert len(split.filename_to_tensors) == math.ceil(count / 2)
        return counted

    assert lines(8_000) < 9 * lines(1_000)


def test_a_pattern_keeps_braces_of_a_name():
    assert shard_pattern("a{b}.safetensors").format(suffix="-1") == "a{b}-1.safetensors"
