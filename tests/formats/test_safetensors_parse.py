"""`parse_header` accepts and refuses what the safetensors library does, and says where the tensors are."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_stream.errors import FormatError
from hf_stream.formats import Header, encode_header, header_nbytes, parse_header, read_header
from hf_stream.formats.dtypes import BITS, TORCH_DTYPES

U64 = 2**64
ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'

NUMBERS = [
    *("0", "1", "2", "3", "4", "8", "-0", "-1", "01", "1.0", "1e0", "1E2", "0.5", "5.", ".5", "+1", "0x1", "1_0"),
    *(str(U64 - 1), str(U64), str(2**63), str(2**61), "1" + "0" * 30, "-" + "9" * 19, "9" * 5000),
    *("NaN", "Infinity", "-Infinity", "true", "false", "null", '"1"', "[]", "{}"),
    *("1e308", "1e309", "1e-999", "0e999", "0.0e999999999999", "1e999999999999", "1e-999999999999", "1e00000000000001"),
    *("1.7976931348623157e308", "1.7976931348623158e308", "17976931348623157081e289", "-1.7976931348623159e308"),
    *(
        "9" * 200 + "e100",
        "0." + "9" * 200 + "e308",
        "9" * 5000 + "e-4990",
        "0." + "0" * 400 + "1e400",
        "0." + "0" * 92 + "17976931348623158e400",
        "1" + "0" * 309,
    ),
]
STRINGS = ['"a"', '""', r'"\u0061"', r'"\ud83d\ude00"', r'"\ud800"', r'"\udc00"', r'"\ud800\ud800"', r'"\\ud800"']
STRINGS += [
    r'"\uD83D\uDE00\udE00"',
    r'"\u00e9"',
    r'"\x"',
    r'"\u12"',
    r'"\u+123"',
    '"\x01"',
    '"\x7f"',
    '"\n"',
    r'"\/\b\f"',
]
STRINGS += ["'a'", "a", '"a', r'"\ud800\u0061"', r'"\u0000"', '"\N{GRINNING FACE}"', r'"\uDBFF\\uDFFF"']
DEEP = [opening * depth + inner + closing * depth for depth in (1, 124, 125, 126, 300, 3000)
        for opening, inner, closing in (("[", "", "]"), ("[", "1", "]"), ('{"x":', "{}", "}"))]  # fmt: skip
ODD = [*NUMBERS, *STRINGS, *DEEP, "[null,{}]", '{"a":1,"a":2}', '{"F32":null}', '{"F32":[]}', '{"F32":null,"F16":null}']
ODD += ["[1,]", "[,1]", '{"a":1,}', '{"a"}', '{"a" 1}', "// x", "nul", ""]


def outcome_of_library(data: bytes, directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Tensors that the library finds, None if it refuses; `safe_open` and `deserialize` must agree."""
    path = directory / "x.safetensors"
    path.write_bytes(data)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            opened = {
                key: (file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()) for key in file.offset_keys()
            }
    except (safetensors.SafetensorError, OSError):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(data)
        return None
    tensors = dict(safetensors.deserialize(data))
    assert opened == {key: (entry["dtype"], entry["shape"]) for key, entry in tensors.items()}
    return {key: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for key, entry in tensors.items()}


def check_same_as_library(data: bytes, directory: Path) -> Header | None:
    wanted = outcome_of_library(data, directory)
    if wanted is None:
        with pytest.raises(FormatError, match=r"^'x': "):
            parse_header(data, len(data), "x")
        return None
    header = parse_header(data, len(data), "x")
    got = {key: (info.dtype, info.shape, data[info.start : info.stop]) for key, info in header.tensors.items()}
    assert got == wanted
    starts = [info.start for info in header.tensors.values()]
    assert starts == sorted(starts)
    assert header.nbytes == len(data)
    with safetensors.safe_open(directory / "x.safetensors", framework="pt") as file:
        assert header.metadata == (file.metadata() or {})
    return header


def framed(header: str | bytes, body: int = 4) -> bytes:
    text = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + bytes(index % 251 for index in range(body))


@st.composite
def headers(draw: st.DrawFn, odds: st.SearchStrategy[int]) -> bytes:
    """A file whose header is well formed but for at most so many odd values, put together from JSON fragments."""
    left = draw(odds)

    def maybe(good: str, bad: list[str]) -> str:
        nonlocal left
        if left and draw(st.integers(0, 5)) == 0:
            left -= 1
            return draw(st.sampled_from(bad))
        return good

    def space() -> str:
        return draw(st.sampled_from(["", "", "", "", " ", "\n\t\r "]))

    def members(pairs: list[tuple[str, str]]) -> str:
        return "{" + ",".join(f"{space()}{key}{space()}:{value}{space()}" for key, value in pairs) + "}"

    entries, end = [], 0
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(list(BITS)))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=3))
        bits = BITS[dtype]
        for size in shape:
            bits *= size
        if bits % 8 and draw(st.integers(0, 9)):
            shape, bits = [*shape, 4], bits * 4
        start, end = end, end + bits // 8
        shift = int(maybe("0", ["-1", "1", str(U64)]))
        fields = [
            ('"dtype"', maybe(json.dumps(dtype), [*ODD, '"f32"', '"F128"', '"I64"', f'{{"{dtype}":null}}'])),
            ('"shape"', maybe("[" + ",".join(maybe(str(size), NUMBERS) for size in shape) + "]", ODD)),
            ('"data_offsets"', maybe(f"[{maybe(str(start), NUMBERS)},{maybe(str(end + shift), NUMBERS)}]", ODD)),
        ]
        if maybe("", ["list"]):
            items = [value for _, value in fields]
            items = items[: int(maybe("3", ["2", "0"]))] + ([maybe("1", ODD)] if maybe("", ["longer"]) else [])
            entry = f"[{','.join(items)}]"
        else:
            if maybe("", ["extra"]):
                fields.append((maybe('"x"', STRINGS), draw(st.sampled_from(ODD))))
            if maybe("", ["again"]):
                fields.append(draw(st.sampled_from(fields)))
            if maybe("", ["missing"]):
                fields.pop()
            entry = members(draw(st.permutations(fields)))
        entries.append((maybe(f'"t{number}"', [*STRINGS, '"t0"', '"__metadata__"']), maybe(entry, ODD)))
    if draw(st.booleans()):
        pairs = [(maybe('"format"', STRINGS), maybe('"pt"', ODD)) for _ in range(draw(st.integers(0, 2)))]
        entries.append(('"__metadata__"', maybe(members(pairs), ["null", *ODD])))
    if entries and maybe("", ["again"]):
        entries.append(draw(st.sampled_from(entries)))
    text = (
        space() + maybe(members(draw(st.permutations(entries))), ODD) + space() + maybe("", ["\0", "}", ",", "\ufeff"])
    )
    data = framed(text, max(0, end + int(maybe("0", ["-1", "1"]))))
    return struct.pack("<Q", max(0, len(text.encode()) + int(maybe("0", ["-1", "1", "-8", "8"])))) + data[8:]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file with a few bytes changed, put in or left out."""
    data = bytearray(draw(headers(odds=st.just(0))))
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.sampled_from([0, 8, 8, 8, 8, 8, 8, 8]))
        place = draw(st.integers(min(first, len(data)), len(data)))
        byte = draw(st.integers(0, 255) | st.sampled_from(b'"\\{}[],:0123456789-.eEu \n'))
        change = draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if change == "set":
            data[place : place + 1] = bytes([byte])
        elif change == "insert":
            data[place:place] = bytes([byte])
            if len(data) > 8 and data[0] < 255:
                data[0] += 1  # keep the length true, so that the change reaches the parser
        elif change == "delete":
            del data[place : place + 1]
            if len(data) > 8 and data[0]:
                data[0] -= 1
        elif draw(st.integers(0, 9)) == 0:
            del data[place:]
    return bytes(data)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parse")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=headers(odds=st.sampled_from([0, 1, 1, 2])))
def test_header_from_fragments_is_judged_as_by_the_library(data: bytes, directory: Path) -> None:
    check_same_as_library(data, directory)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=damaged())
def test_damaged_file_is_judged_as_by_the_library(data: bytes, directory: Path) -> None:
    check_same_as_library(data, directory)


@pytest.mark.parametrize("value", ODD)
def test_odd_value_in_every_place_is_judged_as_by_the_library(value: str, directory: Path) -> None:
    for header in (
        value,
        f'{{"a":{value}}}',
        f'{{"a":{ENTRY},"__metadata__":{value}}}',
        f'{{"a":{ENTRY},"__metadata__":{{"k":{value}}}}}',
        f'{{"a":{{"dtype":{value},"shape":[1],"data_offsets":[0,4]}}}}',
        f'{{"a":{{"dtype":"F32","shape":{value},"data_offsets":[0,4]}}}}',
        f'{{"a":{{"dtype":"F32","shape":[{value}],"data_offsets":[0,4]}}}}',
        f'{{"a":{{"dtype":"F32","shape":[1],"data_offsets":{value}}}}}',
        f'{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[{value},4]}}}}',
        f'{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":{value}}}}}',
        f'{{"a":["F32",[1],[0,4],{value}]}}',
        f'{{"a":{ENTRY}}}{value}',
        f'{{{value}:{ENTRY}}}',
        f'{{"a":{ENTRY},{value}:{ENTRY}}}',
    ):  # fmt: skip
        check_same_as_library(framed(header), directory)


@pytest.mark.parametrize(
    ("header", "body", "fact"),
    [
        (b"\xff{}", 0, "not JSON in UTF-8"),
        ("[]", 0, "not a JSON object"),
        ("{} {}", 0, "not JSON"),
        ("[" * 100_000, 0, "nests deeper than 127 levels"),
        (f'{{"a":{ENTRY}}}', 3, "file has 65"),
        (f'{{"a":{ENTRY}}}', 5, "file has 67"),
        ('{"a":{"dtype":"F3","shape":[1],"data_offsets":[0,4]}}', 4, "'a': unknown dtype 'F3'"),
        ('{"a":{"dtype":' + "[" * 700 + "]" * 700 + f",{ENTRY[15:]}}}", 4, "'a': dtype is not a string"),
        ('{"a":{"dtype":17,"shape":[1],"data_offsets":[0,4]}}', 4, "'a': dtype is not a string"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4, r"'a': 4 bytes, but F32 of shape \[2\] takes 8"),
        ('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', 1, "'a': F4 of shape .* takes 12 bits"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}', 5, "'a': data_offsets .1, 5., .* ends at 0"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}', 0, "'a': data_offsets .1, 0."),
        (f'{{"a":{ENTRY},"b":{ENTRY}}}', 4, "'b': data_offsets .0, 4., .* ends at 4"),
        (f'{{"a":{{"dtype":"U8","shape":[{2**63},2],"data_offsets":[0,4]}}}}', 4, r"more than 2\*\*64 bits"),
        ('{"__metadata__":{"n":1}}', 0, "'n' is not a string"),
        ('{"__metadata__":{},"__metadata__":{}}', 0, "'__metadata__' is repeated"),
        ('{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, "'a': 'dtype' is repeated"),
        ('{"a":{"dtype":"U8"}}', 1, "'a': no shape, data_offsets"),
    ],
)  # fmt: skip
def test_refusal_names_file_tensor_and_numbers(header: str | bytes, body: int, fact: str, directory: Path) -> None:
    data = framed(header, body)
    assert outcome_of_library(data, directory) is None
    with pytest.raises(FormatError, match=rf"^'some/file': .*{fact}.*[:.] *.*get it again\.$"):
        parse_header(data, len(data), "some/file")


def test_header_above_100_mb_is_refused_before_it_is_read(directory: Path) -> None:
    path = directory / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, framework="pt"):
        pass
    with pytest.raises(FormatError, match="100000001 bytes, the limit is 100000000"):
        read_header(path)


@pytest.mark.parametrize("size", range(10))
def test_file_of_a_few_bytes_is_judged_as_by_the_library(size: int, directory: Path) -> None:
    check_same_as_library(b"\x02\0\0\0\0\0\0\0{}"[:size], directory)


def test_reader_takes_the_header_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    data = framed(f'{{"a":{ENTRY}}}')
    path.write_bytes(data)
    opened: list[tuple[int, int]] = []

    class Watched(io.FileIO):
        def __exit__(self, *args: object) -> None:
            opened.append((self.tell(), os.fstat(self.fileno()).st_size))
            super().__exit__(*args)

        def read(self, size: int = -1) -> bytes:
            return super().read(min(size, 5))  # a system call may return less than was asked for

    monkeypatch.setattr("builtins.open", lambda file, mode, **_: Watched(file, mode))
    header = read_header(path)
    monkeypatch.undo()
    assert opened == [(len(data) - 4, len(data))]
    assert header == parse_header(data, len(data))


def test_prefix_without_the_whole_header_is_refused() -> None:
    data = framed(f'{{"a":{ENTRY}}}')
    assert header_nbytes(data[:8], len(data)) == len(data) - 4
    with pytest.raises(FormatError, match="got 20 bytes of a header of 62 bytes"):
        parse_header(data[:20], len(data))


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_torch_view_of_an_entry_is_what_the_library_loads(dtype: str, directory: Path) -> None:
    data = framed(f'{{"a":{{"dtype":"{dtype}","shape":[2,4],"data_offsets":[0,{BITS[dtype]}]}}}}', BITS[dtype])
    header = check_same_as_library(data, directory)
    assert header is not None
    info = header.tensors["a"]
    assert info.nbytes == BITS[dtype]
    with safetensors.safe_open(directory / "x.safetensors", framework="pt") as file:
        if dtype not in TORCH_DTYPES:
            with pytest.raises(safetensors.SafetensorError):
                file.get_tensor("a")
            with pytest.raises(FormatError, match=f"{dtype} has no torch type"):
                _ = info.torch_dtype
        else:
            loaded = file.get_tensor("a")
            assert (info.torch_dtype, info.torch_shape) == (loaded.dtype, tuple(loaded.shape))


def test_float4_with_an_odd_last_dimension_has_no_torch_shape(directory: Path) -> None:
    header = check_same_as_library(framed('{"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}', 3), directory)
    assert header is not None
    with pytest.raises(FormatError, match=r"F4 of shape \[2, 3\]"):
        _ = header.tensors["a"].torch_shape


def test_work_grows_linearly_with_the_number_of_tensors() -> None:
    # Counted, not timed: calls of Python functions while reading 1,000 and 8,000 tensors.
    def calls(count: int) -> int:
        prefix, wanted = encode_header({f"layers.{i}.weight": (torch.bfloat16, (4, 2)) for i in range(count)}, {})
        counted = 0

        def count_call(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count_call)
        try:
            header = parse_header(prefix, wanted.nbytes)
        finally:
            sys.setprofile(None)
        assert header == wanted
        return counted

    assert calls(8_000) < 9 * calls(1_000)
