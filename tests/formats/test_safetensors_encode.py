"""`encode_header` gives the bytes that `safetensors.torch.save_file` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_stream.errors import FormatError
from hf_stream.formats import encode_header, parse_header, read_header
from hf_stream.formats.dtypes import BITS, NAMES

TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\/\b\f\n\r\t\0\x1f\x7f\u2028\U0001f600'), max_size=12
)
SPECS = st.dictionaries(
    TEXT.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(NAMES, key=str)), st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3)),
    max_size=6,
).map(lambda specs: {name: spec for name, spec in specs.items() if spec != (torch.float4_e2m1fn_x2, [])})


def tensors_for(specs: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    """Tensors of random bytes: view(uint8, ...) -> [*shape] of dtype."""
    tensors = {}
    for seed, (name, (dtype, shape)) in enumerate(specs.items()):
        generator = torch.Generator().manual_seed(seed)
        count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        limit = 2 if dtype == torch.bool else 256
        tensors[name] = torch.randint(limit, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    return tensors


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encode") / "x.safetensors"


@settings(max_examples=300, deadline=None)
@given(specs=SPECS, metadata=st.none() | st.dictionaries(TEXT, TEXT, max_size=1))
def test_header_and_tensor_bytes_are_the_file_that_save_file_writes(
    specs: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str] | None, path: Path
) -> None:
    assume(specs or metadata != {})  # see the next test
    tensors = tensors_for(specs)
    save_file(tensors, path, metadata=metadata)
    written = path.read_bytes()

    prefix, header = encode_header(specs, metadata)
    body = b"".join(bytes(tensors[name].reshape(-1).view(torch.uint8).tolist()) for name in header.tensors)
    assert prefix + body == written
    assert header == parse_header(prefix, len(written)) == read_header(path)
    for name, info in header.tensors.items():
        assert (info.torch_dtype, list(info.torch_shape)) == specs[name]


def test_empty_metadata_without_tensors_is_a_valid_file_unlike_the_one_of_the_library(path: Path) -> None:
    save_file({}, path, metadata={})
    with pytest.raises(FormatError, match="not JSON"):
        read_header(path)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(path.read_bytes())
    prefix, _ = encode_header({}, {})
    assert safetensors.deserialize(prefix) == []


@given(metadata=st.dictionaries(TEXT, TEXT, min_size=2, max_size=5), specs=SPECS)
def test_several_metadata_entries_are_sorted_and_read_back(
    metadata: dict[str, str], specs: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    prefix, header = encode_header(specs, metadata)
    assert encode_header(dict(reversed(specs.items())), dict(reversed(metadata.items()))) == (prefix, header)
    parsed = parse_header(prefix, header.nbytes)
    assert parsed == header
    assert list(parsed.metadata.items()) == sorted(metadata.items())


def test_every_torch_dtype_is_written_or_refused_as_by_the_library(path: Path) -> None:
    dtypes = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    taken = set()
    for dtype in dtypes:
        try:
            save_file({"x": torch.zeros(32, dtype=torch.uint8).view(dtype)}, path)
        except (KeyError, safetensors.SafetensorError):
            with pytest.raises(FormatError, match=f"tensor 'x': safetensors cannot hold {dtype}. Cast it to one of"):
                encode_header({"x": (dtype, [2])})
        else:
            taken.add(dtype)
            _, header = encode_header({"x": (dtype, [32 // dtype.itemsize])})
            assert header == read_header(path)
    assert taken == set(NAMES)


def test_order_is_by_falling_alignment_then_by_name(path: Path) -> None:
    dtypes = sorted(NAMES, key=str)
    specs = {f"{name}.{index}": (dtype, [1]) for name in ("b", "a") for index, dtype in enumerate(dtypes)}
    save_file(tensors_for(specs), path)  # type: ignore[arg-type]
    _, header = encode_header(specs)
    with safetensors.safe_open(path, framework="pt") as file:
        assert list(header.tensors) == file.offset_keys()
    bits = [BITS[info.dtype] for info in header.tensors.values()]
    assert bits[0] == 64
    assert bits[-1] == 8


@pytest.mark.parametrize(
    ("specs", "metadata", "fact"),
    [
        ({"__metadata__": (torch.float32, [1])}, None, "no tensor can be called '__metadata__'"),
        ({"x": (torch.complex128, [1])}, None, "'x': safetensors cannot hold torch.complex128"),
        ({"x": (torch.float4_e2m1fn_x2, [])}, None, "'x': F4 of shape .* takes 4 bits"),
        ({"x": (torch.float32, [-1])}, None, r"'x': shape \[-1\] has a negative size"),
        (
            {"x": (torch.float32, [2**62])},
            None,
            r"'x': F32 of shape \[4611686018427387904\] has more than 2\*\*64 bits",
        ),
        ({"\ud800": (torch.float32, [1])}, None, "is not Unicode text"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    specs: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str] | None, fact: str
) -> None:
    with pytest.raises(FormatError, match=fact):
        encode_header(specs, metadata)


def test_metadata_that_is_not_text_is_a_type_error_as_in_the_library() -> None:
    with pytest.raises(TypeError):
        safetensors.serialize({}, {"step": 3})
    with pytest.raises(TypeError, match="metadata entry 'step': 3 is not text"):
        encode_header({}, {"step": 3})


def test_header_above_100_mb_is_refused() -> None:
    with pytest.raises(FormatError, match=r"header of 1000000.. bytes for 1 tensors, the limit is 100000000"):
        encode_header({"x" * 100_000_000: (torch.uint8, [1])})
