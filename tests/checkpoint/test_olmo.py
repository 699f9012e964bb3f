"""Safetensors files of OLMo: real ones with what its own reader gives, and made-up ones."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from file_facts import pwned
from hypothesis import given, settings
from hypothesis import strategies as st
from nestings import assert_same, floats, plain, texts
from safetensors.torch import load_file, save_file

import hf_stream
from hf_stream import CheckpointError, FormatError, LazyTensor
from hf_stream.checkpoint import olmo_state

DATA = Path(__file__).parents[1] / "data" / "olmo"


@pytest.fixture(autouse=True)
def _nothing_is_run():
    yield
    assert not pwned()


def name_of(keys: tuple[Any, ...], pickled: bool = False, protocol: int = 4) -> str:
    return base64.urlsafe_b64encode(pickle.dumps((keys, pickled), protocol)).decode()


def as_tensor(value: Any, protocol: int = 4) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol)), dtype=torch.uint8)


def write(path: Path, state: dict[Any, Any], protocol: int = 4) -> Path:
    """A file as OLMo makes it: tensors as they are, dicts walked into, all else pickled."""
    found: dict[str, torch.Tensor] = {}

    def walk(keys: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk((*keys, key), item)
        elif isinstance(value, torch.Tensor):
            found[name_of(keys, False, protocol)] = value.contiguous()
        else:
            found[name_of(keys, True, protocol)] = as_tensor(value, protocol)

    walk((), state)
    save_file(found, path)
    return path


def told(value: Any) -> Any:
    """A value as expected.json tells it."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        sha256 = hashlib.sha256(content).hexdigest()
        return ["tensor", {"dtype": str(value.dtype).split(".")[1], "shape": list(value.shape), "sha256": sha256}]
    if isinstance(value, dict):
        return [kind, [[told(key), told(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [kind, [told(item) for item in value]]
    if isinstance(value, float):
        return [kind, value.hex() if math.isfinite(value) else str(value)]
    if isinstance(value, bytes):
        return [kind, value.hex()]
    if type(value) is int and abs(value) > 1 << 53:
        return [kind, str(value)]
    return [kind, value]


def expected(folder: str, which: str) -> Any:
    return json.loads((DATA / folder / "expected.json").read_text())[which]


@pytest.mark.parametrize("folder", ["full", "model_only"])
def test_files_of_olmo_give_what_its_own_reader_gives(folder):
    loaded = hf_stream.load_nested(DATA / folder / "state.safetensors")
    assert told(loaded) == expected(folder, "olmo_safetensors_loaded")


@pytest.mark.parametrize("folder", ["full", "model_only"])
def test_tensors_are_opened_lazily(folder):
    path = DATA / folder / "state.safetensors"
    lazies = list(tensors_in(hf_stream.open_nested(path)))
    assert {type(tensor) for tensor in lazies} == {LazyTensor}
    assert told(hf_stream.materialize(lazies)) == told(list(tensors_in(hf_stream.load_nested(path))))


def tensors_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


@pytest.mark.parametrize("folder", ["full", "model_only"])
def test_the_file_of_torch_save_gives_what_torch_gives(folder):
    path = DATA / folder / "state.pt"
    loaded = hf_stream.load_nested(path, prefer_safetensors=False)
    assert told(loaded) == expected(folder, "pt_loaded")
    assert_same(loaded, torch.load(path, weights_only=True))


@pytest.mark.parametrize("folder", ["full", "model_only"])
@pytest.mark.parametrize("source", ["state.pt", "state.safetensors"])
def test_conversion_keeps_all_of_it(folder, source, tmp_path):
    path = tmp_path / "ours.safetensors"
    hf_stream.convert(DATA / folder / source, path, verify=True)
    wanted = hf_stream.load_nested(DATA / folder / source, prefer_safetensors=False)
    assert_same(hf_stream.load_nested(path), wanted)
    assert pickle.PROTO + b"\x04" not in path.read_bytes()


def test_a_tensor_in_a_list_is_named_and_refused_or_skipped(caplog):
    path = DATA / "tensor_in_list" / "state.safetensors"
    with pytest.raises(FormatError, match=r"'list': .*'torch._utils._rebuild_tensor_v2'.*skip_unreadable"):
        hf_stream.open_nested(path)
    found = hf_stream.load_nested(path, skip_unreadable=True)
    assert told(found) == ["dict", expected("tensor_in_list", "olmo_safetensors_loaded")[1][:1]]
    assert "1 values are left out: 'list'" in caplog.text


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("evil_value", r"'value': the pickle wants to make 'io.open'"),
        ("evil_name", r"the name 'gASV.* is none of OLMo's: the pickle wants to make 'io.open'"),
        ("name_not_a_pair", r"the name 'gASV.* is none of OLMo's: it is no pair"),
    ],
)
def test_hostile_files_are_refused(file, named):
    path = DATA / "hostile" / f"{file}.safetensors"
    with pytest.raises(FormatError, match=named):
        hf_stream.open_nested(path)
    with pytest.raises(FormatError, match=named):
        hf_stream.load_nested(path)


def test_what_is_harmless_in_hostile_files_can_be_had():
    folder = DATA / "hostile"
    for file in ("evil_value", "evil_name"):
        found = hf_stream.load_nested(folder / f"{file}.safetensors", skip_unreadable=True)
        assert [list(value) for value in found.values()] == [["w"]]
    # Values that are pickles are no tensors, and not read.
    assert list(hf_stream.open_checkpoint(folder / "evil_value.safetensors")) == ["w"]
    with pytest.raises(FormatError, match=r"wants to make 'io.open'"):
        hf_stream.open_checkpoint(folder / "evil_name.safetensors")


def test_an_ordinary_file_is_none_of_olmo():
    path = DATA / "hostile" / "plain_names.safetensors"
    assert set(hf_stream.open_checkpoint(path)) == set(load_file(path))
    with pytest.raises(CheckpointError, match="use open_checkpoint"):
        hf_stream.open_nested(path)


def test_names_that_look_like_base64_are_still_names(tmp_path):
    tensors = {"weight": torch.ones(2), "bias": torch.ones(1), "gASV": torch.ones(1), "KAAAAA==": torch.ones(1)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert set(hf_stream.open_checkpoint(tmp_path / "x.safetensors")) == set(tensors)


int64s = st.integers(-(2**63), 2**63 - 1)
keys = st.one_of(
    texts.filter(lambda text: text != "__metadata__"),
    int64s,
    st.none(),
    floats.filter(lambda x: x == x),
    st.tuples(texts, int64s),
)
uint8 = torch.tensor([1, 2, 3], dtype=torch.uint8)
leaves = st.one_of(
    plain.filter(lambda value: type(value) is not complex),
    st.lists(st.one_of(st.integers(), texts), max_size=3),
    st.tuples(floats, floats),
    st.lists(st.dictionaries(texts, floats, max_size=3), max_size=2),
    # Each its own: safetensors refuses tensors that share memory.
    st.sampled_from(
        [torch.arange(6.0).reshape(2, 3), uint8, torch.empty(0, 3), torch.tensor(1, dtype=torch.bfloat16)]
    ).map(torch.clone),
)
states = st.dictionaries(
    keys, st.recursive(leaves, lambda items: st.dictionaries(keys, items, min_size=1, max_size=3), max_leaves=8),
    max_size=4,
)  # fmt: skip


def unordered(value: Any) -> Any:
    """Dicts in an order of their own, as the file does not keep it."""
    if not isinstance(value, dict):
        return value
    return dict(sorted(((key, unordered(item)) for key, item in value.items()), key=lambda pair: repr(pair[0])))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@settings(max_examples=60)
@given(states.filter(bool), st.sampled_from([3, 4, 5]))
def test_states_written_as_olmo_does_come_back(directory, state, protocol):
    path = write(directory / "state.safetensors", state, protocol)
    assert_same(unordered(hf_stream.load_nested(path)), unordered(state))
    hf_stream.convert(path, directory / "ours.safetensors")
    if not (all(isinstance(item, torch.Tensor) and type(key) is str for key, item in state.items())):
        assert_same(unordered(hf_stream.load_nested(directory / "ours.safetensors")), unordered(state))


def test_the_optimizer_goes_on_as_if_nothing_had_happened(tmp_path):
    def steps(optimizer: torch.optim.Optimizer, weight: torch.Tensor, count: int) -> torch.Tensor:
        for number in range(count):
            optimizer.zero_grad()
            (weight * (number + 1)).square().sum().backward()
            optimizer.step()
        return weight

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    steps(optimizer, weight, 3)
    path = write(tmp_path / "optim.safetensors", {"model": {"w": weight.detach()}, "optim": optimizer.state_dict()})
    loaded = hf_stream.load_nested(path)
    other = torch.nn.Parameter(loaded["model"]["w"])
    resumed = torch.optim.AdamW([other], lr=0.5)
    resumed.load_state_dict(loaded["optim"])
    assert torch.equal(steps(resumed, other, 3), steps(optimizer, weight, 3))


def test_the_empty_state_of_sgd_which_olmo_loses_is_read_from_the_file_itself(tmp_path, caplog):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    write(tmp_path / "optim.safetensors", optimizer.state_dict())
    assert list(hf_stream.open_nested(tmp_path / "optim.safetensors")) == ["param_groups"]
    for read in (hf_stream.open_nested, hf_stream.load_nested):
        assert_same(read(tmp_path / "optim.pt"), optimizer.state_dict())
    assert "not read in the place of 'optim.pt', as it holds something else: 'state' is missing" in caplog.text
    torch.optim.SGD([weight], lr=0.5).load_state_dict(hf_stream.load_nested(tmp_path / "optim.pt"))


def test_a_flat_file_opens_by_its_names(tmp_path):
    tensors = {"transformer.wte.weight": torch.randn(4, 2), "transformer.ln_f.weight": torch.randn(2)}
    path = write(tmp_path / "model.safetensors", tensors)
    checkpoint = hf_stream.open_checkpoint(path)
    assert_same(unordered(hf_stream.materialize(checkpoint)), unordered(tensors))
    assert checkpoint.facts("transformer.wte.weight") == ("F32", (4, 2), 32)
    # The directory of a step: model.safetensors is what counts in it.
    write(tmp_path / "optim.safetensors", {"state": {0: {"step": torch.ones(1)}}, "param_groups": []})
    assert hf_stream.open_checkpoint(tmp_path).keys() == tensors.keys()

    hf_stream.convert(path, tmp_path / "ours.safetensors")
    assert_same(load_file(tmp_path / "ours.safetensors"), unordered(tensors))


def test_tensors_of_a_nested_file_open_at_a_key(tmp_path):
    model = {"a.weight": torch.ones(2), "b": torch.zeros(3)}
    path = write(tmp_path / "x.safetensors", {"model": model, "ema": {"model": {3: torch.ones(1)}}, "epoch": 3})
    assert_same(unordered(hf_stream.materialize(hf_stream.open_checkpoint(path, key="model"))), unordered(model))
    assert list(hf_stream.open_checkpoint(path, key="ema/model")) == ["3"]
    with pytest.raises(CheckpointError, match=r"holds 2 dicts.*'ema/model' \(1 tensors\).*open_nested"):
        hf_stream.open_checkpoint(path)
    with pytest.raises(CheckpointError, match="nothing at the key 'nowhere'"):
        hf_stream.open_checkpoint(path, key="nowhere")


def test_nested_files_of_ours_open_at_a_key_as_well(tmp_path):
    state = {"model": {"a.weight": torch.ones(2)}, "optim": [torch.zeros(3)]}
    path = hf_stream.save_nested(state, tmp_path / "x.safetensors")
    assert set(hf_stream.open_checkpoint(path)) == {"model/a.weight", "optim/0"}
    assert_same(hf_stream.materialize(hf_stream.open_checkpoint(path, key="model")), state["model"])
    with pytest.raises(CheckpointError, match="nothing at the key"):
        hf_stream.open_checkpoint(path, key="nowhere")


def test_parameters_are_plain_tensors_in_a_checkpoint(tmp_path):
    path = hf_stream.save_nested({"model": {"w": torch.nn.Parameter(torch.ones(2))}}, tmp_path / "x.safetensors")
    opened = hf_stream.open_checkpoint(path, key="model")["w"]
    assert not opened.requires_grad
    assert not isinstance(opened, torch.nn.Parameter)


def entries(path: Path, *named: tuple[str, torch.Tensor]) -> Path:
    save_file(dict(named), path)
    return path


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([name_of(("a",)), name_of(("a",), protocol=2)], "two values at 'a'"),
        ([name_of(("a",)), name_of(("a", "b"))], "two values at 'a"),
        ([name_of(("a", 1)), name_of(("a", True))], "the key (1|True) .* equals another"),
        ([name_of((1, "a")), name_of((1.0, "b"))], "the key 1(.0)? .* equals another"),
        ([name_of(((1,), "a")), name_of(((True,), "b"))], "equals another"),
        ([name_of(())], "it has 0 keys"),
        ([name_of(("a",) * 101)], "it has 101 keys"),
        ([name_of((float("nan"),))], "a float is no key"),
        ([name_of(([],))], "a list is no key"),
        ([base64.urlsafe_b64encode(pickle.dumps((("a",), 1))).decode()], "no pair of keys and a mark"),
        ([base64.urlsafe_b64encode(pickle.dumps((["a"], True))).decode()], "no pair of keys and a mark"),
        ([base64.urlsafe_b64encode(pickle.dumps((("a",), True, 3))).decode()], "no pair of keys and a mark"),
        ([base64.urlsafe_b64encode(pickle.dumps(7)).decode()], "no pair of keys and a mark"),
        ([base64.urlsafe_b64encode(b"\x80\x04K.").decode()], "damaged"),
    ],
)
def test_names_that_make_no_nesting_are_refused(tmp_path, names, message):
    path = entries(tmp_path / "x.safetensors", *((name, ONE.clone()) for name in names))
    with pytest.raises(FormatError, match=message):
        hf_stream.open_nested(path)
    with pytest.raises(FormatError, match=message):
        hf_stream.open_checkpoint(path)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (ONE, "'a': a pickle is a row of bytes, not torch.float32 of shape \\[1\\]"),
        (torch.zeros(2, 2, dtype=torch.uint8), "'a': a pickle is a row of bytes"),
        (torch.zeros(3, dtype=torch.uint8), "'a': the pickle is damaged"),
        (torch.zeros(0, dtype=torch.uint8), "'a': the pickle is damaged"),
        (as_tensor(OrderedDict(x=1)), "'a': .*'collections.OrderedDict'"),
        (as_tensor([print]), "'a': .*'builtins.print'"),
        (as_tensor({1, 2}), "'a': .*not plain"),
        (as_tensor(1j), "'a': .*'builtins.complex'"),
    ],
)
def test_values_that_are_not_plain_are_named_and_refused_or_skipped(tmp_path, tensor, message):
    good = ((name_of(("b",)), ONE.clone()), (name_of(("c",), True), as_tensor("text")))
    path = entries(tmp_path / "x.safetensors", (name_of(("a",), True), tensor), *good)
    with pytest.raises(FormatError, match=message):
        hf_stream.open_nested(path)
    assert unordered(hf_stream.load_nested(path, skip_unreadable=True)) == {"b": ONE, "c": "text"}


def test_values_that_share_a_dict_are_not_merged(tmp_path):
    path = entries(
        tmp_path / "x.safetensors", (name_of(("a",), True), as_tensor({"x": 1})), (name_of(("a", "y")), ONE.clone())
    )
    with pytest.raises(FormatError, match="two values at 'a'"):
        hf_stream.open_nested(path)


def test_sizes_of_values_are_limited(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"a": "x" * 600, "b": "y" * 600, "c": "z" * 3000})
    monkeypatch.setattr(olmo_state, "_MAX_VALUE", 2000)
    with pytest.raises(FormatError, match=r"'c': its pickle has .* bytes, at most 2000 are read"):
        hf_stream.open_nested(path)
    monkeypatch.setattr(olmo_state, "_MAX_VALUES", 1000)
    assert len(hf_stream.open_nested(path, skip_unreadable=True)) == 1


def test_a_key_that_is_one_object_three_times_in_a_path(tmp_path):
    key = "".join(["sa", "me"])
    state = {key: {key: {key: ONE, "other": 1}}}
    path = write(tmp_path / "x.safetensors", state)
    assert unordered(hf_stream.load_nested(path)) == unordered(state)


def test_floats_keep_their_bits(tmp_path):
    values = [-0.0, math.inf, 5e-324, struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]]
    path = write(tmp_path / "x.safetensors", {"a": values, "b": {"c": values[-1]}})
    assert_same(unordered(hf_stream.load_nested(path)), {"a": values, "b": {"c": values[-1]}})


def test_skipping_is_of_no_effect_elsewhere(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state = {"a": [torch.ones(2), 3]}
    path = hf_stream.save_nested(state, tmp_path / "x.safetensors")
    assert_same(hf_stream.load_nested(path, skip_unreadable=True), state)
    assert caplog.text == ""
