from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestings import assert_same, states
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from samples import files_of, same_bits
from torch.testing._internal.two_tensor import TwoTensor

import hf_stream
from hf_stream.checkpoint import nested_structure
from hf_stream.checkpoint.nested_sharing import place_tensors
from hf_stream.copying import overlap
from hf_stream.errors import CheckpointError, CopyError, FormatError
from hf_stream.lazy import LazyTensor
from hf_stream.storage import FileStorage


def adam_like() -> dict[str, object]:
    state = {n: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, n + 1)} for n in range(3)}
    return {"state": state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1, 2]}]}


def materialized(state):
    """The nesting with real tensors for lazy ones."""
    if isinstance(state, LazyTensor):
        return torch.nn.Parameter(state.materialize(), state.requires_grad) if is_parameter(state) else real(state)
    if isinstance(state, dict):
        items = [(key, materialized(value)) for key, value in state.items()]
        return type(state)(dict(items)) if type(state) is not dict else dict(items)
    if type(state) in (list, tuple):
        return type(state)(map(materialized, state))
    return state


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def real(lazy: LazyTensor) -> torch.Tensor:
    return lazy.materialize().requires_grad_(lazy.requires_grad)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(state=states, single=st.booleans(), limit=st.integers(1, 60))
def test_every_state_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, state, single, limit) -> None:
    top = tmp_path_factory.mktemp("nested")
    path = top / ("x.safetensors" if single else "x")
    assert hf_stream.save_nested(state, path, max_shard_size=None if single else limit) == path
    assert_same(hf_stream.load_nested(path), state)
    opened = hf_stream.open_nested(path)
    assert_same(materialized(opened), state)
    # What is opened is streamed into another place, and is the same file there.
    hf_stream.save_nested(opened, top / "again.safetensors")
    assert_same(hf_stream.load_nested(top / "again.safetensors"), state)
    if single:
        assert (top / "again.safetensors").read_bytes() == path.read_bytes()


def test_the_file_is_an_ordinary_one_with_readable_names(tmp_path: Path) -> None:
    state = adam_like()
    hf_stream.save_nested(state, tmp_path / "optimizer.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer.safetensors"]
    wanted = {f"state/{n}/{kind}": state["state"][n][kind] for n in range(3) for kind in ("step", "exp_avg")}
    plain = load_file(tmp_path / "optimizer.safetensors")
    assert plain.keys() == wanted.keys()
    assert all(same_bits(plain[name], tensor) for name, tensor in wanted.items())
    assert not hf_stream.verify(tmp_path / "optimizer.safetensors", wanted)
    with safe_open(tmp_path / "optimizer.safetensors", "pt") as file:
        structure = json.loads(file.metadata()["hf_stream.structure"])
    assert structure["state"]["dict"]["param_groups"][0]["dict"]["betas"] == {"tuple": [0.9, 0.999]}
    # Saved by the library with its metadata, it is a nested state still.
    save_file(plain, tmp_path / "copy.safetensors", {"hf_stream.structure": json.dumps(structure)})
    assert_same(hf_stream.load_nested(tmp_path / "copy.safetensors"), state)


def test_a_directory_lives_beside_a_model(tmp_path: Path) -> None:
    hf_stream.save_checkpoint({"w": torch.ones(3)}, tmp_path)
    state = adam_like()
    for limit in (10**6, 20, None):
        hf_stream.save_nested(state, tmp_path, max_shard_size=limit)
        assert_same(hf_stream.load_nested(tmp_path), state)
        assert list(hf_stream.open_checkpoint(tmp_path)) == ["w"]
    assert set(files_of(tmp_path)) == {"model.safetensors", "state.safetensors"}
    hf_stream.save_nested(state, tmp_path / "new", max_shard_size=20)
    assert len(hf_stream.open_checkpoint(tmp_path / "new")) == 6
    assert_same(hf_stream.load_nested(tmp_path / "new" / "state.safetensors.index.json"), state)


def test_opening_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(1000), "p": torch.nn.Parameter(torch.ones(3)), "n": np.arange(1000)}
    hf_stream.save_nested(state, tmp_path / "s.safetensors")
    header = int.from_bytes((tmp_path / "s.safetensors").read_bytes()[:8], "little") + 8
    read = []
    plain = FileStorage.read_scattered

    def counted(self, buffers, offset):
        read.append(offset + sum(map(len, buffers)))
        return plain(self, buffers, offset)

    monkeypatch.setattr(FileStorage, "read_scattered", counted)
    opened = hf_stream.open_nested(tmp_path / "s.safetensors")
    assert max(read, default=0) <= header
    assert isinstance(opened["a"], LazyTensor)
    assert isinstance(opened["p"], LazyTensor)
    opened["n"][0] = 5  # a mapping of its own
    assert hf_stream.open_nested(tmp_path / "s.safetensors")["n"][0] == 0


# Memory that is shared


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    w = torch.randn(3, 4)
    p = torch.nn.Parameter(torch.randn(2))
    array = np.arange(6.0)
    state = {
        "turned": w.T,
        "first": w,
        "again": [w, w.detach()],
        "row": w[1],
        "columns": (w[:, :2], w[:, 2:]),
        "wide": w[0, :1].expand(5),
        "p": p,
        "p.data": p.detach(),
        "array": array,
        "tensor": torch.from_numpy(array),
        "part": array[2:4],
    }
    hf_stream.save_nested(state, tmp_path / "s.safetensors")
    assert sorted(load_file(tmp_path / "s.safetensors")) == ["array", "first", "p"]
    hf_stream.save_nested(hf_stream.open_nested(tmp_path / "s.safetensors"), tmp_path / "again.safetensors")
    for path in (tmp_path / "s.safetensors", tmp_path / "again.safetensors"):
        loaded = hf_stream.load_nested(path)
        assert_same(loaded, state)
        assert loaded["first"] is loaded["again"][0] is loaded["again"][1]
        loaded["first"].fill_(7)
        for name in ("row", "turned", "wide"):
            assert (loaded[name] == 7).all(), name
        assert (loaded["columns"][1] == 7).all()
        with torch.no_grad():
            loaded["p"].fill_(8)
        assert (loaded["p.data"] == 8).all()
        loaded["array"][:] = 9
        assert (loaded["part"] == 9).all()
        # An array that is opened has its own mapping of the file.
        assert (loaded["tensor"] == 9).all() == (path.name == "s.safetensors")


def test_conjugates_and_negatives_are_values_of_their_own(tmp_path: Path) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    state = {"z": z, "conj": z.conj(), "neg": torch._neg_view(z)}
    hf_stream.save_nested(state, tmp_path / "s.safetensors")
    loaded = hf_stream.load_nested(tmp_path / "s.safetensors")
    assert all(torch.equal(loaded[name], tensor.resolve_conj().resolve_neg()) for name, tensor in state.items())


def test_empty_tensors_and_read_only_arrays(tmp_path: Path) -> None:
    fixed = np.arange(3)
    fixed.flags.writeable = False
    empty = torch.empty(0, 2)
    state = {"a": empty, "b": torch.empty(0, 2), "c": empty, "fixed": [fixed, fixed]}
    hf_stream.save_nested(state, tmp_path / "s.safetensors")
    loaded = hf_stream.load_nested(tmp_path / "s.safetensors")
    assert_same(loaded, state)
    assert loaded["a"] is loaded["c"]
    assert loaded["fixed"][0] is loaded["fixed"][1]
    assert loaded["a"] is not loaded["b"]


def test_neighbours_in_one_storage_are_tensors_of_their_own(tmp_path: Path) -> None:
    flat = torch.randn(24)
    matrix = torch.randn(6, 6)
    state = {"flat": flat.split([3, 8, 13]), "even": matrix[:, ::2], "odd": matrix[:, 1::2], "none": flat[3:3]}
    hf_stream.save_nested(state, tmp_path / "s.safetensors")
    assert load_file(tmp_path / "s.safetensors").keys() == {"flat/0", "flat/1", "flat/2", "even", "odd", "none"}
    assert_same(hf_stream.load_nested(tmp_path / "s.safetensors"), state)


@pytest.mark.parametrize(
    "overlapping",
    [
        lambda x: (x[:4], x[2:]),
        lambda x: (x.T, x[0]),
        lambda x: (x, x.view(torch.int32)),
        lambda x: (x[:, 1:], x[:, :-1]),
        lambda x: (x.flatten()[::2], x.flatten()[::3]),
    ],
)
def test_tensors_that_overlap_without_one_that_holds_all_are_refused(tmp_path: Path, overlapping) -> None:
    a, b = overlapping(torch.zeros(6, 5))
    with pytest.raises(CheckpointError, match="overlap in memory"):
        hf_stream.save_nested({"x": [a], "y": b}, tmp_path / "s.safetensors")
    assert not list(tmp_path.iterdir())
    hf_stream.save_nested({"x": [a], "y": b.clone()}, tmp_path / "s.safetensors")
    assert_same(hf_stream.load_nested(tmp_path / "s.safetensors"), {"x": [a], "y": b})


@pytest.mark.parametrize("cut", [lambda x: x.split(1, 0), lambda x: x.split(1, 1)])
def test_many_pieces_of_one_storage_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch, cut) -> None:
    sorts: list[int] = []
    monkeypatch.setattr(
        overlap,
        "_clusters",
        lambda extents, clusters=overlap._clusters: sorts.append(len(extents)) or clusters(extents),
    )
    pieces = cut(torch.zeros(10_000, 3)) + cut(torch.zeros(3, 10_000))
    places = place_tensors([(str(number), piece) for number, piece in enumerate(pieces)])
    assert all(place == (str(number), None) for number, place in enumerate(places))
    assert 10_000 <= sum(sorts) < 100_000


def test_lazies_share_as_what_is_under_them(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "w.safetensors")
    w = hf_stream.open_checkpoint(tmp_path / "w.safetensors")["w"]
    double = w * 2
    state = {
        "w": w,
        "again": w.detach(),
        "row": w[1],
        "turned": w.T,
        "double": [double, double],
        "cat": torch.cat([w, w]),
    }
    hf_stream.save_nested({**state, "a": w[0:2].T, "b": w[1:3].T}, tmp_path / "s.safetensors")
    assert sorted(load_file(tmp_path / "s.safetensors")) == ["cat", "double/0", "w"]
    # Windows of a file that overlap are values, not memory.
    hf_stream.save_nested({"a": w[0:2].T, "b": w[1:3].T}, tmp_path / "t.safetensors")
    assert_same(hf_stream.load_nested(tmp_path / "t.safetensors"), {"a": real(w)[0:2].T, "b": real(w)[1:3].T})


# What is refused


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: torch.ones(2, device="meta"), "is on the meta device"),
        (lambda: torch.nn.Parameter(torch.ones(2, device="meta")), "is on the meta device"),
        (lambda: torch.eye(2).to_sparse(), "has the layout torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "has the layout torch.sparse_csr"),
        (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "is a TwoTensor"),
        (lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "is a Mine, whose type would be lost"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor"),
        (lambda: torch.nn.UninitializedParameter(), "is a UninitializedParameter"),
        (lambda: torch.ones(2, dtype=torch.complex128), "safetensors cannot hold torch.complex128"),
        (lambda: np.array(["a"]), "numpy array of '<U1'"),
        (lambda: np.array([None]), "numpy array of '|O'"),
        (lambda: np.ones(2, ">f4"), "numpy array of '>f4'"),
        (lambda: np.ones(2, np.complex128), "numpy array of '<c16'"),
        (lambda: np.ones(2).view(np.recarray), "is a numpy.rec.recarray"),
        (lambda: np.datetime64("2020-01-01"), "is a numpy.datetime64"),
        (lambda: torch.Generator(), "is a torch._C.Generator"),
        (lambda: torch.nn.Linear(2, 2), "is a torch.nn.modules.linear.Linear"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "is a quantized tensor"),
        (lambda: bytearray(b"x"), "is a builtins.bytearray"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested", "ignore:Sparse CSR")
def test_what_a_file_cannot_hold_is_refused_by_its_path(tmp_path: Path, make, fact: str) -> None:
    value = make()
    with pytest.raises((CheckpointError, FormatError), match=f"'state/0/x'.*{re.escape(fact)}"):
        hf_stream.save_nested({"state": {0: {"x": value}}, "w": torch.ones(3)}, tmp_path / "new" / "s.safetensors")
    assert not list(tmp_path.iterdir())


def test_tensors_whose_memory_was_given_back_are_refused(tmp_path: Path) -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match=r"'a/0' of shape \[4\] has a storage of 0 bytes"):
        hf_stream.save_nested({"a": [freed]}, tmp_path / "s.safetensors")


def test_a_size_for_shards_of_one_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is to be one file"):
        hf_stream.save_nested({}, tmp_path / "s.safetensors", max_shard_size="1GB")


def test_a_file_without_structure_is_none_of_ours(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"has tensors but no structure.*open_checkpoint"):
        hf_stream.open_nested(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        hf_stream.load_nested(tmp_path / "x.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        hf_stream.load_nested(tmp_path / "empty")


def test_an_index_of_no_files_is_no_state(tmp_path: Path) -> None:
    (tmp_path / "state.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="has tensors but no structure"):
        hf_stream.load_nested(tmp_path)


def test_shards_of_two_states_are_no_state(tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        hf_stream.save_nested({"x": torch.ones(4), "y": torch.ones(4), "lr": lr}, tmp_path / name, max_shard_size=16)
    shard = "state-00002-of-00002.safetensors"
    (tmp_path / "a" / shard).write_bytes((tmp_path / "b" / shard).read_bytes())
    with pytest.raises(CheckpointError, match="belong to different states"):
        hf_stream.load_nested(tmp_path / "a")


def wrapped(state: object) -> str:
    return json.dumps({"version": 1, "state": state})


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "is not JSON"),
        ("[]", "no object of 'version'"),
        ("{}", "no object of 'version'"),
        ('{"version":1}', "no object of 'version'"),
        ('{"version":true,"state":1}', "no object of 'version'"),
        ('{"version":2,"state":1}', "has version 2, known is 1"),
        ('{"version":1,"state":1,"state":2}', "no object of 'version'"),
        ('{"version":1,"other":1}', "has no 'state'"),
        ('{"version":1,"tensor":"w"}', "has no 'state'"),
        ('{"version":1,"tensor":"__structure__"}', "'__structure__' is not the text"),
        (wrapped({"tensor": "x"}), "the file has no tensor 'x'"),
        (wrapped(1), "2 tensors have no place in the structure, 'i' for one"),
        (wrapped({"tensor": "w"}), "1 tensors have no place in the structure, 'i' for one"),
        (wrapped({"tensor": 1}), "neither the name of a tensor nor an object"),
        (wrapped({"tensor": {"name": 1}}), "'name' is not text"),
        (wrapped({"tensor": {"name": "w", "parameter": 1}}), "a flag is not true or false"),
        (wrapped({"tensor": {"name": "w", "more": 1}}), "unknown field 'more'"),
        (wrapped({"tensor": {"name": "w", "size": [2]}}), "not those of a view"),
        (wrapped({"tensor": {"name": "w", "size": [2], "stride": [1], "offset": -1}}), "not those of a view"),
        (wrapped({"tensor": {"name": "w", "size": [2], "stride": [1, 1], "offset": 0}}), "not those of a view"),
        (wrapped({"tensor": {"name": "w", "size": [2], "stride": [1], "offset": True}}), "not those of a view"),
        (wrapped({"tensor": {"name": "w", "size": [2], "stride": [1], "offset": 5}}), "element 6 of a tensor of 6"),
        (wrapped({"tensor": {"name": "w", "size": [2], "stride": [2**62], "offset": 0}}), "a view of element"),
        (wrapped({"tensor": {"name": "w", "size": [2**62, 4], "stride": [0, 0], "offset": 0}}), "no tensor"),
        (wrapped({"tensor": {"name": "i", "requires_grad": True}}), "no tensor"),
        (wrapped({"tensor": {"name": "i", "parameter": True, "requires_grad": True}}), "no tensor"),
        ('{"version":1,"state":{"tensor":{"name":"w","name":"i"}}}', "a field is repeated"),
        (wrapped({"dtype": "load"}), "'load' is not one"),
        (wrapped({"dtype": 1}), "1 is not one"),
        (wrapped({"device": "moon"}), "no device"),
        (wrapped({"device": 1}), "no device"),
        (wrapped({"device": "cuda:99999"}), "no device"),
        (wrapped({"Size": [1.5]}), "are not sizes"),
        (wrapped({"Size": {"a": 1}}), "are not sizes"),
        (wrapped({"numpy": ["float64", "00"]}), "1 bytes of a float64"),
        (wrapped({"numpy": ["object", "00" * 8]}), "not a type and its bytes"),
        (wrapped({"numpy": [["a"], "00"]}), "no numpy"),
        (wrapped({"numpy": ["float64", "zz"]}), "no numpy"),
        (wrapped({"numpy": ["float64", 1]}), "no numpy"),
        (wrapped({"numpy": 1}), "no numpy"),
        (wrapped({"numpy": {"a": 1, "b": 2}}), "not a type and its bytes"),
        (wrapped({"ndarray": "h"}), "the file has no tensor 'h'"),
        (wrapped({"ndarray": {"name": "i", "size": [9], "stride": [1], "offset": 0}}), "a view of element 8"),
        (wrapped({"function": "os.system"}), "nothing is known of 'function'"),
    ],
)
def test_a_hostile_structure_is_a_format_error(tmp_path: Path, text: str, fact: str) -> None:
    file = tmp_path / "s.safetensors"
    save_file({"w": torch.ones(2, 3), "i": torch.ones(3, dtype=torch.int32)}, file, {"hf_stream.structure": text})
    for function in (hf_stream.open_nested, hf_stream.load_nested):
        with pytest.raises(FormatError, match=fact) as caught:
            function(file)
        assert str(file) in str(caught.value)
        assert len(str(caught.value)) < 800


def test_types_that_numpy_or_torch_have_not(tmp_path: Path) -> None:
    file = tmp_path / "s.safetensors"
    save_file({"w": torch.ones(2).bfloat16()}, file, {"hf_stream.structure": wrapped({"ndarray": "w"})})
    for function in (hf_stream.open_nested, hf_stream.load_nested):
        with pytest.raises(FormatError, match="no ndarray"):
            function(file)
    header = json.dumps(
        {
            "__metadata__": {"hf_stream.structure": wrapped({"tensor": "w"})},
            "w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        }
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with pytest.raises(FormatError, match="has no torch type"):
        hf_stream.open_nested(file)


# A structure too large for a header


def test_a_large_structure_is_a_tensor_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_structure, "_MAX_METADATA", 100)
    state = {"w": torch.ones(3), "list": list(range(1000)), "__structure__": torch.zeros(2), "text": "\u00e9"}
    for path in (tmp_path / "s.safetensors", tmp_path / "s"):
        hf_stream.save_nested(state, path)
        assert_same(hf_stream.load_nested(path), state)
        names = hf_stream.open_checkpoint(path).keys()
        assert names == {"w", '"__structure__"', "__structure__"}
        hf_stream.save_nested(hf_stream.open_nested(path), path)
        assert_same(hf_stream.load_nested(path), state)


def test_a_damaged_tensor_of_bytes_is_a_format_error(tmp_path: Path) -> None:
    marker = '{"version":1,"tensor":"__structure__"}'
    for content in (b"\xff", b"{", marker.encode()):
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        save_file({"__structure__": tensor}, tmp_path / "s.safetensors", {"hf_stream.structure": marker})
        with pytest.raises(FormatError, match=r"s\.safetensors"):
            hf_stream.load_nested(tmp_path / "s.safetensors")


# All or nothing, progress, devices


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def update(self, n: int) -> None:
        self.total += n


class Refuses:
    def update(self, n: int) -> None:
        raise OSError("enough")


@pytest.mark.parametrize("name", ["s.safetensors", "s"])
def test_a_failed_save_leaves_the_old_state(tmp_path: Path, name: str) -> None:
    hf_stream.save_nested(adam_like(), tmp_path / name)
    before = files_of(tmp_path)
    with pytest.raises((OSError, CopyError)):
        hf_stream.save_nested(adam_like(), tmp_path / name, progress=Refuses())
    assert files_of(tmp_path) == before
    with pytest.raises((OSError, CopyError)):
        hf_stream.save_nested(adam_like(), tmp_path / "other" / name, progress=Refuses())
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("name", ["s.safetensors", "s"])
def test_a_state_may_be_saved_over_the_file_it_is_read_from(tmp_path: Path, name: str) -> None:
    state = adam_like()
    hf_stream.save_nested(state, tmp_path / name)
    opened = hf_stream.open_nested(tmp_path / name)
    opened["param_groups"][0]["lr"] = 0.5
    hf_stream.save_nested(opened, tmp_path / name)
    state["param_groups"][0]["lr"] = 0.5
    assert_same(hf_stream.load_nested(tmp_path / name), state)


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    state = adam_like()
    nbytes = sum(tensor.nbytes for entry in state["state"].values() for tensor in entry.values())
    saved, loaded = Counter(), Counter()
    hf_stream.save_nested(state, tmp_path / "s.safetensors", progress=saved)
    hf_stream.load_nested(tmp_path / "s.safetensors", progress=loaded)
    assert saved.total == loaded.total == nbytes


def test_tensors_go_where_they_are_wanted_and_arrays_stay(tmp_path: Path) -> None:
    hf_stream.save_nested({"w": torch.ones(3), "n": np.ones(2)}, tmp_path / "s.safetensors")
    loaded = hf_stream.load_nested(tmp_path / "s.safetensors", "meta")
    assert loaded["w"].device.type == "meta"
    assert_same(loaded["n"], np.ones(2))


def test_other_files_beside_the_one_stay(tmp_path: Path) -> None:
    for name in ("s-00001-of-00002.safetensors", "s.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"kept")
    hf_stream.save_nested([1], tmp_path / "s.safetensors")
    assert files_of(tmp_path).keys() == {"s-00001-of-00002.safetensors", "s.safetensors.index.json", "s.safetensors"}


def test_names_of_files_with_braces(tmp_path: Path) -> None:
    hf_stream.save_nested([1], tmp_path / "{suffix}{0}.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["{suffix}{0}.safetensors"]
    assert hf_stream.load_nested(tmp_path / "{suffix}{0}.safetensors") == [1]


def test_no_pickle_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.delattr(pickle, name)
    state = {
        **adam_like(),
        "rng": np.random.get_state(),
        "p": torch.nn.Parameter(torch.ones(2)),
        "size": torch.Size([1]),
    }
    with pytest.raises(AttributeError):
        torch.save(state, tmp_path / "s.pt")
    hf_stream.save_nested(state, tmp_path / "s.safetensors")
    assert_same(hf_stream.load_nested(tmp_path / "s.safetensors"), state)
