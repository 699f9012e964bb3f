"""Pickles written by hand, with names in them that are not looked up, that want much or call what they must not."""

from __future__ import annotations

import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from memory_peaks import peak_of
from torch_files import write_pickle

import hf_stream
from hf_stream.errors import CheckpointError, FormatError


def text(content: str) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def long(number: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", number)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


SYSTEM = named("os", "system")
OBJECT = SYSTEM + b")R"
ORDERED_DICT = named("collections", "OrderedDict")


def write(folder: Path, data: bytes, **storages: bytes) -> Path:
    return write_pickle(folder / "x.pt", b"\x80\x02" + data + b".", **storages)


def test_nothing_is_imported(tmp_path, monkeypatch):
    tells = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"
    (tmp_path / "module_that_tells.py").write_text(tells)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path, b"}(" + text("m") + b"}" + text("o") + named("module_that_tells", "Thing") + b")Ru")
    assert hf_stream.open_nested(path, skip_unreadable=True) == {"m": {}}
    assert not (tmp_path / "imported").exists()


BOMBS = {
    "objects": b"](" + SYSTEM + b"q\x01" + b"h\x01)R" * 100_000 + b"e",
    "names": b"](" + b"ca\nb\n" * 100_000 + b"e",
    "calls of calls": SYSTEM + b")R" * 300_000,
    "states in states": SYSTEM + b"q\x01)\x81" + b"h\x01)\x81" * 150_000 + b"b" * 150_000,
    "items in items": SYSTEM + b"q\x01)\x81" + b"h\x01)\x81" * 150_000 + b"a" * 150_000,
    "arguments in arguments": SYSTEM + b"q\x01" * 2 + b"h\x01" * 150_000 + b")" + b"\x81\x85" * 150_000 + b"R",
    "keys": b"}(" + SYSTEM + b"q\x01N" + b"h\x01)RN" * 100_000 + b"u",
    "parts of a key": b"}((" + SYSTEM + b"q\x01" + b"h\x01)R" * 200_000 + b"tNu",
    "a large thing given to many": b"}("
    + text("large")
    + b"]q\x02("
    + b"]" * 50_000
    + b"e"
    + text("many")
    + b"]("
    + SYSTEM
    + b"q\x01"
    + b"h\x01h\x02\x85R" * 50_000
    + b"eu",
}


@pytest.mark.parametrize("name", BOMBS)
def test_objects_take_their_part_of_the_budget(tmp_path, name):
    path = write(tmp_path, BOMBS[name])
    for read in (hf_stream.open_nested, hf_stream.open_checkpoint):
        for skip_unreadable in (False, True):

            def work(read=read, skip_unreadable=skip_unreadable):
                with suppress(FormatError, CheckpointError):
                    read(path, skip_unreadable=skip_unreadable)

            assert peak_of(work) < 100 * path.stat().st_size + (80 << 20)


def test_what_an_object_is_given_is_never_hashed(tmp_path):
    prime = sys.hash_info.modulus
    keys = [b"(" + b"".join(long(prime * (n >> 2 * at & 3)) for at in range(8)) + b"tN" for n in range(60_000)]
    data = b"}(" + text("made") + SYSTEM + b")\x81(" + b"".join(keys) + b"u" + text("step") + b"K\x03u"
    assert hf_stream.open_nested(write(tmp_path, data), skip_unreadable=True) == {"step": 3}


@pytest.mark.parametrize(
    "data",
    [
        named("torch._utils", "_rebuild_tensor_v2") + b"(" + OBJECT + b"K\x00K\x01\x85K\x01\x85\x89NtR",
        named("torch._tensor", "_rebuild_from_type_v2") + b"(" + ORDERED_DICT + SYSTEM + b")NtR",
        named("torch.nn.parameter", "Parameter") + b")\x81",
        named("builtins", "set") + OBJECT + b"\x85R",
        named("builtins", "bytearray") + OBJECT + b"\x85R",
        named("torch", "Size") + OBJECT + b"\x85\x85R",
        named("torch", "device") + OBJECT + b"\x85R",
        ORDERED_DICT + OBJECT + b"\x85R",
        ORDERED_DICT + b")R}" + OBJECT + b"Nsb",
        ORDERED_DICT + b")\x81",
        OBJECT + b"Q",
        SYSTEM + b"}b",
        SYSTEM + b"K\x01a",
        SYSTEM + b"K\x01K\x02s",
        b"}" + OBJECT + b"b",
        b"]" + OBJECT + b"R",
        b"]" + OBJECT + b"Ns",
        b"(" + text("storage") + SYSTEM + text("0") + text("cpu") + b"K\x03tQ",
    ],
)
def test_objects_where_none_can_be(tmp_path, data):
    path = write(tmp_path, data)
    for options in ({}, {"skip_unreadable": True}):
        with pytest.raises(FormatError, match=r"x\.pt"):
            hf_stream.open_nested(path, **options)


def test_a_tensor_that_an_unknown_function_makes_is_no_tensor_that_is_missing(tmp_path):
    storage = b"(" + text("storage") + named("torch", "ByteStorage") + text("0") + text("cpu") + b"K\x03tQ"
    made = named("torch._utils", "_rebuild_tensor_v9") + b"(" + storage + b"K\x00K\x03\x85K\x01\x85tR"
    path = write(tmp_path, b"}" + text("w") + made + b"s", _0=b"abc")
    for read in (hf_stream.open_checkpoint, hf_stream.open_nested):
        with pytest.raises(
            (FormatError, CheckpointError), match=r"'w' is an object made by 'torch\._utils\._rebuild_tensor_v9'"
        ):
            read(path)


def test_long_keys_one_in_the_other_make_no_long_messages(tmp_path):
    key = text("k" * 1_000_000) + b"q\x01"
    path = write(tmp_path, b"}" + key + b"}h\x01" * 400 + OBJECT + b"s" * 401)
    for read in (hf_stream.open_nested, hf_stream.open_checkpoint):
        with pytest.raises((FormatError, CheckpointError)) as error:
            read(path)
        assert len(str(error.value)) < 2000
