from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import hypothesis
import pytest
import torch
from file_facts import pwned
from hypothesis import strategies as st
from memory_peaks import anonymous
from samples import random_bits, same_bits
from torch_files import (
    FOLDER,
    assert_same_state,
    expected,
    files,
    leaves,
    outline,
    records_of,
    write_pickle,
    write_records,
)

import hf_stream
from hf_stream.checkpoint.torch_nesting import open_torch_file
from hf_stream.errors import CopyError, FormatError
from hf_stream.lazy import LazyTensor
from hf_stream.storage.inflated import InflatedFile

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol 3")

# What the README of these files says torch itself reads right.
_RIGHT = {"bad/data_byte_flipped.pt"}
_UNUSUAL_READ = {"unusual/odd_storage_keys.pt", "unusual/saved_on_cuda.pt"}


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize("name", files("good"))
def test_good_files_give_what_torch_gives(name: str) -> None:
    ours = open_torch_file(FOLDER / name)
    assert_same_state(ours, torch.load(FOLDER / name, weights_only=True))


@pytest.mark.parametrize("name", [*files("good"), *sorted(_UNUSUAL_READ)])
def test_files_give_what_was_written_down_when_they_were_made(name: str) -> None:
    facts, ours = expected(name), open_torch_file(FOLDER / name, verify=True)
    assert outline(ours) == facts["structure"]
    found = dict(leaves(ours))
    assert [list(path) for path in found] == [fact["path"] for fact in facts["tensors"]]
    places: dict[object, int] = {}
    for fact in facts["tensors"]:
        lazy = found[tuple(fact["path"])]
        assert (list(lazy.shape), str(lazy.dtype)) == (fact["shape"], "torch." + fact["dtype"])
        assert hashlib.sha256(_bits(lazy.materialize())).hexdigest() == fact["sha256"]
        if fact.get("conj") or fact.get("neg") or not isinstance(lazy._source, hf_stream.lazy.sources.Leaf):
            continue
        assert [list(lazy.stride()), lazy.storage_offset()] == [fact["stride"], fact["storage_offset"]]
        if "legacy" not in name and fact["storage_nbytes"]:
            assert places.setdefault(lazy._source, fact["storage_group"]) == fact["storage_group"]
            if fact.get("record", {}).get("stored"):
                assert lazy._source.base == fact["record"]["data_offset_in_file"]


@pytest.mark.parametrize("name", files("bad", "hostile"))
def test_damaged_and_hostile_files_are_refused_by_name(name: str) -> None:
    if name in _RIGHT:
        open_torch_file(FOLDER / name)
    with pytest.raises(FormatError, match=Path(name).name):
        open_torch_file(FOLDER / name, verify=True)
    assert not pwned()


@pytest.mark.parametrize("name", files("unusual"))
def test_unusual_files_read_right_or_are_refused(name: str) -> None:
    if name in _UNUSUAL_READ:
        assert_same_state(open_torch_file(FOLDER / name), torch.load(FOLDER / name, "cpu", weights_only=True))
    else:
        with pytest.raises(FormatError, match=Path(name).name):
            open_torch_file(FOLDER / name)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("sparse_coo", "'sparse' is a sparse"),
        ("quantized", "'q' is a quantized"),
        ("nested_tensor", "'nested' is a nested"),
        ("bare_storage", "'storage' is a storage"),
        ("meta_tensor", "'meta' is a tensor on the meta device"),
    ],
)
def test_what_has_no_plain_bytes_is_refused_by_its_name(name: str, place: str) -> None:
    with pytest.raises(FormatError, match=place):
        open_torch_file(FOLDER / f"unusual/{name}.pt")


def test_names_that_users_have_allowed_change_nothing() -> None:
    path = FOLDER / "unusual/namespace_args.pt"
    with torch.serialization.safe_globals([argparse.Namespace, (open, "io.open")]):
        assert isinstance(torch.load(path, weights_only=True)["args"], argparse.Namespace)
        with pytest.raises(FormatError, match=r"argparse\.Namespace"):
            open_torch_file(path)
        for name in ("hostile/open_after_tensor.pt", "hostile/legacy_open.pt"):
            with pytest.raises(FormatError, match=r"io\.open"):
                open_torch_file(FOLDER / name)
    assert not pwned()


_KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 70000), st.booleans(), st.none(), st.tuples(st.text(max_size=2)))
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(min_size=1, max_size=5),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), torch.strided, torch.device("cuda", 1)]),
)


@st.composite
def _states(draw: st.DrawFn) -> object:
    base = random_bits((draw(st.integers(1, 40)),), torch.float32, 1).nan_to_num()
    pool = [
        base,
        torch.nn.Parameter(base[:1].clone()),
        torch.zeros(0, 3),
        torch.tensor(2),
        base.to(torch.complex64).conj(),
    ]
    views = st.builds(lambda a, b: base[min(a, b) : max(a, b) + 1 : 2], st.integers(0, 39), st.integers(0, 39))
    tensors = st.one_of(st.sampled_from(pool), views, st.just(base.expand(3, -1)))
    return draw(
        st.recursive(
            st.one_of(tensors, _VALUES),
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.lists(inner, max_size=4).map(tuple),
                st.dictionaries(_KEYS, inner, max_size=4),
                st.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict),
                st.dictionaries(_KEYS, st.integers(0, 3), max_size=3).map(Counter),
                st.sets(st.integers(0, 9)),
            ),
            max_leaves=12,
        )
    )


@hypothesis.given(state=_states())
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_nesting_comes_back(tmp_path_factory: pytest.TempPathFactory, state: object) -> None:
    path = tmp_path_factory.mktemp("nesting") / "x.pt"
    torch.save(state, path)
    assert_same_state(open_torch_file(path), torch.load(path, weights_only=True))


def test_attributes_of_modules_and_tensors_come_along(tmp_path: Path) -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    noted = torch.nn.Parameter(torch.ones(2))
    noted.note = ("kept", torch.zeros(1))
    torch.save({"state": state, "noted": noted}, tmp_path / "x.pt")
    ours = open_torch_file(tmp_path / "x.pt")
    assert ours["state"]._metadata == state._metadata
    assert ours["noted"].note[0] == "kept"
    assert isinstance(ours["noted"].note[1], LazyTensor)


def test_a_cycle_is_followed_once(tmp_path: Path) -> None:
    state: dict[str, object] = {"w": torch.ones(2)}
    state["itself"] = [state]
    torch.save(state, tmp_path / "x.pt")
    ours = open_torch_file(tmp_path / "x.pt")
    assert ours["itself"][0] is ours
    assert torch.equal(ours["w"].materialize(), torch.ones(2))


def test_only_the_directory_and_the_pickle_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting_file
) -> None:
    torch.save({f"w{n}": torch.full((1000,), n) for n in range(20)}, tmp_path / "x.pt")
    monkeypatch.setattr("hf_stream.checkpoint.torch_file.FileStorage", counting_file)
    state = open_torch_file(tmp_path / "x.pt")
    file = state["w0"]._source.storage
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        directory = file.nbytes - archive.start_dir
        pickled = sum(info.file_size for info in archive.infolist() if not info.filename.startswith("x/data/"))
        headers = sum(30 + len(info.filename) for info in archive.infolist())
    # The end of the directory is looked at before the directory.
    assert file.read_counts.sum() <= directory + 100 + headers + pickled
    for lazy in state.values():
        base = lazy._source.base
        assert not file.read_counts[base : base + 8000].any()
    state["w7"][10:20].materialize()
    assert file.read_counts[state["w7"]._source.base :][80:160].eq(1).all()
    assert file.read_counts[state["w7"]._source.base :][:80].eq(0).all()


def test_a_view_reads_its_window_of_a_large_storage(tmp_path: Path, monkeypatch, counting_file) -> None:
    base = torch.arange(100_000.0)
    torch.save({"row": base.view(100, 1000)[7, 3:5], "tied": base, "again": base}, tmp_path / "x.pt")
    monkeypatch.setattr("hf_stream.checkpoint.torch_file.FileStorage", counting_file)
    state = open_torch_file(tmp_path / "x.pt")
    file = state["row"]._source.storage
    before = int(file.read_counts.sum())
    assert state["row"].tolist() == [7003.0, 7004.0]
    assert int(file.read_counts.sum()) == before + 8
    assert state["tied"] is state["again"]
    assert state["tied"]._source == state["row"]._source


def test_memory_is_that_of_the_pickle(tmp_path: Path) -> None:
    # A file of holes: 2 GB that take no space on the disk.
    large, path = (1 << 31) - 1, tmp_path / "large.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data.pkl", _pickle_of_bytes(large))
        archive.writestr("archive/data/0", b"")
        entry = archive.filelist[-1]
        entry.file_size = entry.compress_size = large
        archive.fp.seek(entry.header_offset)
        archive.fp.write(entry.FileHeader(zip64=False))
        archive.start_dir = archive.fp.tell() + large
    before = anonymous()
    state = open_torch_file(path)
    assert state["w"][-3:].tolist() == [0, 0, 0]
    assert anonymous() - before < 8 << 20


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _arguments(numel: int) -> bytes:
    """The arguments of a tensor of all the bytes of storage "0", but for the bracket at their end."""
    storage = b"(" + _text("storage") + b"ctorch\nByteStorage\n" + _text("0") + _text("cpu")
    storage += b"J" + struct.pack("<i", numel) + b"tQ"
    size = b"J" + struct.pack("<i", numel) + b"\x85K\x01\x85"
    return b"(" + storage + b"K\x00" + size + b"\x89ccollections\nOrderedDict\n)Rt"


_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def _pickle_of_bytes(numel: int) -> bytes:
    """{"w": all bytes of storage "0"}, written by hand."""
    return b"\x80\x02}" + _text("w") + _REBUILD + _arguments(numel) + b"Rs."


def test_compressed_entries_are_inflated_when_they_are_needed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = FOLDER / "good/repacked_deflated.pt"
    made: list[str] = []
    inflated = InflatedFile._inflate
    monkeypatch.setattr(InflatedFile, "_inflate", lambda *args: made.append(args[1].name) or inflated(*args))
    state = open_torch_file(path)
    assert not made
    wanted = torch.load(path, weights_only=True)
    for _ in range(2):
        for name, lazy in state.items():
            assert same_bits(lazy.materialize(), wanted[name])
    assert sorted(set(made)) == sorted(made)
    assert len(made) == len({lazy._source for lazy in state.values()})
    assert not list(tmp_path.iterdir())  # scratch files have no names


def test_a_compressed_pickle_cannot_be_larger_than_it_says(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    path = write_records(tmp_path / "y.pt", records_of(tmp_path / "x.pt"), zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    for magic, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):  # the pickle is the first record
        place = content.index(magic) + at
        (size,) = struct.unpack_from("<I", content, place)
        struct.pack_into("<I", content, place, size - 1)
    path.write_bytes(content)
    with pytest.raises(FormatError, match="does not give"):
        open_torch_file(path)


@pytest.mark.parametrize("name", ["data.pkl", "version"])
def test_a_small_file_does_not_become_a_large_pickle(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    records = records_of(tmp_path / "x.pt") | {name: b"]" * (64 << 20)}
    path = write_records(tmp_path / "y.pt", records, zipfile.ZIP_DEFLATED)
    del records
    before = anonymous()
    with pytest.raises(FormatError, match=rf"y\.pt.*{name}'.* {64 << 20} bytes"):
        open_torch_file(path)
    assert anonymous() - before < 50 << 20


def test_deeply_nested_files_are_searched_in_time(tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "x.pt", b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".")
    with pytest.raises(FormatError, match=r"x\.pt' nests deeper than 500 levels"):
        hf_stream.open_checkpoint(path)


def test_tensors_of_tensors_in_files_of_the_old_format(tmp_path: Path) -> None:
    tensor = torch.zeros(3)
    tensor.other = torch.arange(2.0)
    torch.save({"w": tensor}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert same_bits(open_torch_file(tmp_path / "x.pt")["w"].other.materialize(), tensor.other)


@pytest.mark.parametrize("deflated", [False, True])
def test_a_record_that_is_not_as_it_was_saved_is_found_by_verify(tmp_path: Path, deflated: bool) -> None:
    torch.save({"w": torch.arange(100.0)}, tmp_path / "x.pt")
    method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    path = write_records(tmp_path / "y.pt", records_of(tmp_path / "x.pt"), method)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, info.header_offset + 14, info.CRC ^ 1)
    place = content.index(b"archive/data/0", info.header_offset + 60) - 46
    struct.pack_into("<I", content, place + 16, info.CRC ^ 1)
    path.write_bytes(content)
    state = open_torch_file(path)
    with pytest.raises(FormatError, match=r"y\.pt.*'archive/data/0'"):
        open_torch_file(path, verify=True)
    if deflated:
        with pytest.raises(CopyError, match=r"y\.pt.*'archive/data/0'"):
            state["w"].materialize()


def test_records_without_checksums_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    open_torch_file(FOLDER / "good/no_crc32.pt", verify=True)
    assert "has no CRC-32 for 9 of its records" in caplog.text


def test_files_of_the_old_format_have_no_checksums(caplog: pytest.LogCaptureFixture) -> None:
    open_torch_file(FOLDER / "good/legacy_plain_state_dict.pt", verify=True)
    assert "legacy_plain_state_dict.pt' is from before torch 1.6 and has no checksums" in caplog.text


def test_files_of_the_old_format_are_read_in_place(tmp_path: Path, monkeypatch, counting_file) -> None:
    state = {"a": torch.arange(100_000.0), "b": torch.arange(7, dtype=torch.int8), "c": torch.ones(50_000)}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    monkeypatch.setattr("hf_stream.checkpoint.torch_file.FileStorage", counting_file)
    ours = open_torch_file(tmp_path / "x.pt")
    file = ours["a"]._source.storage
    before = int(file.read_counts.sum())
    assert ours["a"][10:12].tolist() == [10.0, 11.0]
    assert int(file.read_counts.sum()) == before + 8
    assert_same_state(ours, state)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.",  # 64 GiB of zeros
        b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x05\x00\x00\x00\x00\x10\x85R.",
        b"\x80\x02ctorch\nFloatTensor\n\x8a\x05\x00\x00\x00\x00\x10\x85R.",
        b"\x80\x02Nr\xff\xff\xff\xff.",  # a place far out in the memo
        b"\x80\x02}(" + b")" + b"\x85" * 500_000 + b"Nu.",  # hashed, it would end the process
        b"\x80\x02(" + b"]" * 10 + b".",
        b"\x80\x02}("
        + b"".join(b"\x8a\x10" + (i * sys.hash_info.modulus).to_bytes(16, "little") + b"N" for i in range(1, 50_000))
        + b"u.",
        # What is there once, copied by many calls
        b"\x80\x02(c_codecs\nencode\n" + _text("a" * 100_000) + _text("latin1") + b"\x86Rq\x00"
        b"cbuiltins\nbytearray\nq\x01" + b"h\x01h\x00\x85R" * 20_000 + b"t.",
        b"\x80\x02(](" + b"".join(b"M" + struct.pack("<H", i) + b"N\x86" for i in range(3000)) + b"eq\x00"
        b"ccollections\nOrderedDict\nq\x01" + b"h\x01h\x00\x85R" * 3000 + b"t.",
        b"\x80\x02((" + b"K\x01" * 997 + b"tq\x08}(" + b"h\x08N" * 100_000 + b"ut.",
        # The product of a size of as many numbers would take hours.
        b"\x80\x02"
        + _REBUILD
        + _arguments(3).replace(
            b"J\x03\x00\x00\x00\x85K\x01\x85",
            b"(\x8a\x08" + b"\x00" * 7 + b"\x40q\x07" + b"h\x07" * 100_000 + b"tq\x08h\x08",
        )
        + b"R.",
        b"\x80\x02" + b"]" + b"]a" * 0 + b"](" * 100_000 + b"e" * 100_000 + b".",
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.",
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00xX\x03\x00\x00\x00hextR.",
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\ndevice\nctorch\nTensor\n)NtR.",
    ],
)
def test_pickles_that_would_take_the_machine_down_do_not(tmp_path: Path, data: bytes) -> None:
    path = write_pickle(tmp_path / "x.pt", data)
    before = anonymous()
    with pytest.raises(FormatError, match=r"x\.pt"):
        open_torch_file(path)
    assert anonymous() - before < 100 << 20


_RIGHT_PICKLE = _pickle_of_bytes(3)
_HOOKS = b"\x89ccollections\nOrderedDict\n)R"


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        (_text("storage"), _text("module"), "something else than a storage"),
        (_HOOKS, _HOOKS + _text("hook") + b"Ns", "hooks"),
        (_HOOKS, b"\x89N" + b"}" + _text("fake") + b"\x88s", "metadata"),
        (_HOOKS, b"\x88ccollections\nOrderedDict\n)R", "requires_grad"),
        (_HOOKS, b"\x89N}" + _text("conj") + b"\x88s", "conjugated"),
        (_text("cpu"), _text("meta"), "device"),
        (_text("0"), b"K\x00", "something else than a storage"),
        (b"K\x00J", b"\x88J", "offset"),
        (b"s.", b"s.N.", "after its end"),
        (b"s.", b"sN.", "one object"),
        (b"\x80\x02}", b"\x80\x02(}", "one object"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v9", "_rebuild_tensor_v9"),
        (b"torch\nByteStorage", b"torch\nQInt8Storage", "is a tensor of torch.qint8"),
        (b"s.", b"s" + _text("kind") + b"ctorch\nByteStorage\ns.", "'kind' is a class of storages"),
        # Counted, not taken for items
        (b"s.", b"s" + _text("c") + b"ccollections\nCounter\n](K\x01K\x02\x86K\x03K\x04\x86e\x85Rs.", "Counter"),
    ],
)
def test_pickles_that_torch_would_not_write_are_refused(tmp_path: Path, old: bytes, new: bytes, fact: str) -> None:
    assert old in _RIGHT_PICKLE
    right = write_pickle(tmp_path / "right.pt", _RIGHT_PICKLE, _0=b"abc")
    assert open_torch_file(right)["w"].tolist() == [97, 98, 99]
    wrong = write_pickle(tmp_path / "wrong.pt", _RIGHT_PICKLE.replace(old, new, 1), _0=b"abc")
    with pytest.raises(FormatError, match=rf"wrong\.pt.*{fact}"):
        open_torch_file(wrong)


@pytest.mark.parametrize("attribute", ["_source", "_window", "data", "materialize", "__class__", "_is_param", "grad"])
def test_a_tensor_cannot_be_given_attributes_that_it_works_with(tmp_path: Path, attribute: str) -> None:
    data = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(" + _REBUILD + b"ctorch\nTensor\n" + _arguments(3)
    fine = write_pickle(tmp_path / "fine.pt", data + b"}" + _text("mine") + b"NstR.", _0=b"abc")
    assert open_torch_file(fine).tolist() == [97, 98, 99]
    path = write_pickle(tmp_path / "x.pt", data + b"}" + _text(attribute) + b"NstR.", _0=b"abc")
    with pytest.raises(FormatError, match="has the attribute"):
        open_torch_file(path)


def test_a_file_cut_short_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(10_000)}, tmp_path / "x.pt")
    state = open_torch_file(tmp_path / "x.pt")
    os.truncate(tmp_path / "x.pt", 5000)
    with pytest.raises(CopyError, match=r"x\.pt"):
        state["w"].materialize()


class _Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 3)
        self.register_buffer("small", torch.ones(2, dtype=torch.float16))
        self.steps = [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_torchscript_archives_are_read_without_their_code(tmp_path: Path) -> None:
    module = torch.nn.Sequential(_Inner(), _Inner())
    module[1].linear.weight = module[0].linear.weight
    torch.jit.save(torch.jit.script(module), tmp_path / "x.pt")
    ours = open_torch_file(tmp_path / "x.pt")
    wanted = module.state_dict()
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(ours[name].materialize(), tensor)
    assert ours["0.linear.weight"]._source == ours["1.linear.weight"]._source


def test_torchscript_classes_are_not_looked_up(tmp_path: Path) -> None:
    data = b"\x80\x02c__torch__.os\nsystem\n)\x81}" + _text("w") + _REBUILD + _arguments(3) + b"Rsb."
    records = {"version": b"3\n", "data.pkl": data, "constants.pkl": pickle.dumps((), 2), "data/0": b"abc"}
    assert open_torch_file(write_records(tmp_path / "x.pt", records))["w"].tolist() == [97, 98, 99]
    records["data.pkl"] = data.replace(b"__torch__.os", b"os")
    with pytest.raises(FormatError, match=r"os\.system"):
        open_torch_file(write_records(tmp_path / "y.pt", records))
