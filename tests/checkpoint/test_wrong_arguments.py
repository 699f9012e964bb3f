"""What people give by mistake: each is refused by the call that got it, in words that say what to give, or taken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import hf_stream
from hf_stream import CheckpointWriter, load_into, materialize, open_checkpoint, save_checkpoint, save_nested, verify
from hf_stream.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    FormatError,
    HfStreamError,
    IndexFileError,
    PickleError,
    SafetensorsError,
    TensorNameError,
)
from hf_stream.layouts import Rename, packed_gate_up

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665f4a8\nsize 90868376\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file(Net().state_dict(), tmp_path / "net.safetensors")
    (tmp_path / "dir").mkdir()
    shutil.copy(tmp_path / "net.safetensors", tmp_path / "dir/model.safetensors")
    return tmp_path


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {
            k: v.clone() if not kwargs.get("keep_vars") else v for k, v in super().state_dict(*args, **kwargs).items()
        }


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(2, 3), "b": torch.zeros(2)}


Mistake = Callable[[], Any]
WRONG_TYPES: dict[str, tuple[Mistake, str]] = {
    "load-a-path": (lambda: load_into(Net(), "dir"), r"got 'dir'; open it: hf_stream.open_checkpoint\('dir'\)"),
    "load-a-module": (lambda: load_into(Net(), Net()), r"got a .*Net; pass its .state_dict\(\)"),
    "load-into-tensors": (
        lambda: load_into(tensors(), Net()),
        "load_into fills a module, which comes first, got a dict",
    ),
    "load-a-list": (
        lambda: load_into(Net(), [torch.ones(1)]),
        "a mapping of names to tensors, got a list; pass a dict",
    ),
    "load-numpy": (
        lambda: load_into(Net(), {"embed.weight": np.ones((8, 4))}),
        r"'embed.weight' is a numpy.ndarray and no tensor; make it one: torch.from_numpy\(",
    ),
    "materialize-a-path": (lambda: materialize("dir"), "takes a mapping or a list of tensors, got 'dir'; open it"),
    "materialize-one": (lambda: materialize(torch.ones(2)), "got a torch.Tensor; put it into a dict with its name, or"),
    "materialize-a-module": (lambda: materialize(Net()), r"pass its .state_dict\(\)"),
    "materialize-numbers": (
        lambda: materialize([torch.ones(1), 3.0]),
        "number 1 is a float and no tensor; make it one",
    ),
    "save-a-module": (lambda: save_checkpoint(Net(), "out"), r"save_checkpoint takes .* pass its .state_dict\(\)"),
    "save-the-wrong-way-round": (lambda: save_checkpoint("out", tensors()), "got 'out'"),
    "save-numpy": (lambda: save_checkpoint({"a": np.float64(1)}, "out"), "'a' is a numpy.float64 and no tensor"),
    "save-a-nesting": (
        lambda: save_checkpoint({"a": {"b": torch.ones(1)}}, "out"),
        "'a' is a dict .* hf_stream.save_nested",
    ),
    "save-nothing": (lambda: save_checkpoint({"a": None}, "out"), "'a' is None and no tensor; leave it out"),
    "save-a-number-as-name": (
        lambda: save_checkpoint({3: torch.ones(1)}, "out"),
        "3 is no name of a tensor; names are",
    ),
    "save-metadata": (
        lambda: save_checkpoint(tensors(), "out", metadata={"a": 1}),
        "metadata entry 'a': 1 is not text",
    ),
    "save-to-nowhere": (lambda: save_checkpoint(tensors(), None), "a path is wanted, got None"),
    "open-tensors": (lambda: open_checkpoint(tensors()), "a path is wanted, got a dict; its tensors are there already"),
    "open-bytes": (lambda: open_checkpoint(b"dir"), "a path is wanted, got a bytes; pass text or a pathlib.Path"),
    "convert-a-module": (lambda: hf_stream.convert(Net(), "out"), "a path is wanted, got a .*Net"),
    "convert-to-nowhere": (lambda: hf_stream.convert("dir", None), "a path is wanted, got None"),
    "nest-the-wrong-way-round": (lambda: save_nested("out", tensors()), "a path is wanted, got a dict"),
    "verify-a-number": (
        lambda: verify("dir", 3),
        "verify takes paths, modules and mappings of named tensors, got an int",
    ),
    "verify-numpy": (lambda: verify("dir", {"a": np.ones(1)}), "'a' is a numpy.ndarray and no tensor"),
    "size-of-none": (lambda: hf_stream.convert("dir", "out", max_shard_size=None), "max_shard_size= is None"),
    "size-of-bool": (lambda: save_checkpoint(tensors(), "out", max_shard_size=True), "max_shard_size= is True, a bool"),
    "buffer-of-none": (lambda: load_into(Net(), {}, buffer_size=None), "buffer_size= is None"),
    "dtype-of-numpy": (
        lambda: hf_stream.convert("dir", "out", dtype=np.float32),
        "no dtype of torch; pass torch.float32",
    ),
    "dtype-of-numpys": (lambda: hf_stream.convert("dir", "out", dtype=np.dtype("f8")), "pass torch.float64"),
    "dtype-of-number": (lambda: hf_stream.convert("dir", "out", dtype=16), "dtype= is 16 and no dtype of torch"),
    "durable-text": (
        lambda: save_checkpoint(tensors(), "out", durable="no"),
        "durable= is 'no'; pass True, False or None",
    ),
    "progress-text": (lambda: save_checkpoint(tensors(), "out", progress="no"), "progress= is 'no'; pass True, False"),
    "layout-name": (
        lambda: hf_stream.convert("dir", "out", layout="packed-qkv"),
        r"layout= is 'packed-qkv'; pass hf_stream.layouts.get\('packed-qkv', config\)",
    ),
    "layout-rule": (
        lambda: verify("dir", "dir", layout=Rename("a", "b")),
        r"put rules into a Layout: Layout\(\[...\]\)",
    ),
    "layout-list": (
        lambda: hf_stream.convert("dir", "out", layout=[Rename("a", "b")]),
        "layout= is a list; put rules into",
    ),
    "layout-model": (lambda: hf_stream.convert("dir", "out", layout=Net()), "layout= is a .*Net; pass a Layout"),
    "layout-uncalled": (
        lambda: hf_stream.convert("dir", "out", layout=packed_gate_up),
        "layout= is the function packed_gate_up; .* if it makes a layout, pass what it returns",
    ),
    "specs-path": (lambda: CheckpointWriter("out", "dir"), "specs= is 'dir'; pass a dict"),
    "specs-shape": (lambda: CheckpointWriter("out", {"a": (2, 3)}), "specs= has 'a': a tuple"),
    "lazy-of-numpy": (lambda: hf_stream.LazyTensor.from_tensor(np.ones(2)), "a numpy.ndarray and no tensor"),
    "out-of-numpy": (lambda: lazy().materialize(np.ones((2, 3))), "out= is a numpy.ndarray and no tensor"),
}
WRONG_VALUES: dict[str, tuple[Mistake, str]] = {
    "negative-shards": (
        lambda: save_checkpoint(tensors(), "out", max_shard_size=-1),
        "max_shard_size= is -1, which is room",
    ),
    "no-shards": (lambda: save_nested(tensors(), "out", max_shard_size=0), "max_shard_size= is 0"),
    "negative-text": (
        lambda: save_checkpoint(tensors(), "out", max_shard_size="-5GB"),
        "'-5GB', which is room for nothing",
    ),
    "words": (
        lambda: save_checkpoint(tensors(), "out", max_shard_size="5 gigabytes"),
        "max_shard_size=: size '5 gigabytes': unit 'gigabytes' is not one of KB, MB, .*GiB, TiB. Write it like '5GB'",
    ),
    "words-for-a-file": (
        lambda: hf_stream.convert("dir", "out.safetensors", max_shard_size="5 gigabytes"),
        "unit 'gigabytes'",
    ),
    "no-unit": (lambda: hf_stream.convert("dir", "out", max_shard_size="5"), "size '5': it has no unit"),
    "half-a-byte": (
        lambda: save_checkpoint(tensors(), "out", max_shard_size=1.5),
        "1.5, and bytes are counted in whole",
    ),
    "buffer-words": (lambda: materialize(tensors(), buffer_size="a lot"), "buffer_size=: size 'a lot': unit 'lot'"),
    "no-buffer": (lambda: verify("dir", "dir", buffer_size=0), "buffer_size= is 0, which is room for nothing"),
    "negative-buffer": (lambda: hf_stream.convert("dir", "out", buffer_size=-64), "buffer_size= is -64"),
    "dtype-typo": (lambda: hf_stream.convert("dir", "out", dtype="bf17"), "dtype= is 'bf17', .* pass 'bf16', 'fp16'"),
    "dtype-int": (lambda: hf_stream.convert("dir", "out", dtype="int8"), "weights cast to that would be lost"),
    "dtype-float4": (
        lambda: hf_stream.plan_conversion("dir", dtype=torch.float4_e2m1fn_x2),
        "dtype= is torch.float4_e2m1fn_x2, and weights cast to that would be lost",
    ),
}


def lazy() -> hf_stream.LazyTensor:
    return hf_stream.LazyTensor.from_tensor(torch.ones(2, 3))


def left(here: Path) -> set[str]:
    return {path.name for path in here.iterdir()}


@pytest.mark.parametrize(("mistake", "words"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_wrong_types_are_type_errors_that_say_what_to_give(here: Path, mistake: Mistake, words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words) as caught:
        mistake()
    assert isinstance(caught.value, TypeError)
    assert left(here) == {"net.safetensors", "dir"}


@pytest.mark.parametrize(("mistake", "words"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_wrong_values_are_value_errors_that_say_what_to_give(here: Path, mistake: Mistake, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        mistake()
    assert isinstance(caught.value, ValueError)
    assert left(here) == {"net.safetensors", "dir"}


@pytest.mark.parametrize("size", ["5GiB", "64 kib", 5e9, np.int64(100), np.float64(1e6), "0.001GB"])
def test_sizes_in_binary_units_and_of_numpy_are_taken(size: Any) -> None:
    save_checkpoint(tensors(), "out", max_shard_size=size)
    assert verify("out", tensors()) == hf_stream.Differences()


def test_a_binary_unit_is_a_power_of_1024() -> None:
    twice = {name: torch.zeros(512, dtype=torch.uint8) for name in "ab"}
    save_checkpoint(twice, "one", max_shard_size="1KiB")
    save_checkpoint(twice, "two", max_shard_size="1KB")
    assert [len(open_checkpoint(place).files) for place in ("one", "two")] == [1, 2]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        ("fp16", torch.float16),
        ("float16", torch.float16),
        ("half", torch.half),
        ("fp32", torch.float32),
        ("double", torch.double),
        ("f8_e4m3", torch.float8_e4m3fn),
        ("float8_e5m2", torch.float8_e5m2),
    ],
)
def test_types_are_known_by_their_names(name: str, wanted: torch.dtype) -> None:
    hf_stream.convert("dir", "out", dtype=name)
    assert {tensor.dtype for tensor in open_checkpoint("out").values()} == {wanted}


def test_buffers_are_as_large_as_their_text_says() -> None:
    state = {"w": torch.arange(1000.0)}
    save_checkpoint(state, "out", buffer_size="1KB")
    assert torch.equal(materialize(open_checkpoint("out"), buffer_size="1 KiB")["w"], state["w"])
    module = nn.Linear(1000, 1, bias=False)
    load_into(module, {"weight": open_checkpoint("out")["w"][None]}, buffer_size="0.5MB")
    assert torch.equal(module.weight[0], state["w"])


def test_modules_and_state_dicts_are_compared_on_either_side() -> None:
    net = Net()
    assert net.head.weight is net.embed.weight
    plain = nn.Module.state_dict(net)
    once = {name: tensor for name, tensor in plain.items() if name != "head.weight"}
    save_checkpoint(once, "once")
    for a, b in [("once", plain), (plain, "once")]:
        assert verify(a, b), "a mapping is taken as it is"
    state_dict = lambda: plain  # noqa: E731
    net.state_dict = state_dict  # type: ignore[method-assign]
    for a, b in [(net, "once"), ("once", net), (net, net), (net, once), (once, net), (net, plain)]:
        assert not verify(a, b)
    with torch.no_grad():
        net.layers[1].bias[2] += 1
    assert verify(net, "once").values.keys() == verify("once", net).values.keys() == {"layers.1.bias"}


def test_a_name_that_is_not_there_says_which_are_like_it() -> None:
    checkpoint = open_checkpoint("dir")
    with pytest.raises(
        TensorNameError, match=r"'dir' has no tensor 'layer.2.weight'; the nearest is 'layers.2.weight'"
    ):
        checkpoint["layer.2.weight"]
    with pytest.raises(TensorNameError, match=r"none is like it .'embed.weight', "):
        checkpoint.facts("x")
    for index in (0, slice(0, 2), None):
        with pytest.raises(
            TensorNameError, match=r"'dir' is indexed by the names of its tensors, such as 'embed.weight'"
        ):
            checkpoint[index]
    assert checkpoint.get("layer.2.weight") is None
    assert checkpoint.get("layer.2.weight", 3) == 3
    assert checkpoint.get("embed.weight") is checkpoint["embed.weight"]
    assert "x" not in checkpoint


def test_a_name_that_was_not_announced_says_which_one_is() -> None:
    with (
        pytest.raises(CheckpointError, match="'wieght' is not among the 1 tensors announced, where 'weight' is"),
        CheckpointWriter("out", {"weight": torch.ones(2)}) as writer,
    ):
        writer.write("wieght", torch.ones(2))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("dri", "did you mean 'dir'"),
        ("net.safetensor", "did you mean 'net.safetensors'"),
        ("~/dir", "only shells know what '~' is"),
        ("meta-llama/Llama-3", r"of the Hub, pass huggingface_hub.snapshot_download\('meta-llama/Llama-3'\)"),
        ("quite/another/place", "pass a directory, a weight file, an index file or a pattern"),
    ],
)
def test_a_path_that_is_not_there_says_what_may_be_meant(path: str, words: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"'{path}' does not exist.*{words}"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["out.gguf", "OUT.GGUF", "out.pt", "out.bin", "out.onnx", "out.h5"])
@pytest.mark.parametrize(
    "save",
    [
        lambda path: save_checkpoint(tensors(), path),
        lambda path: save_nested(tensors(), path),
        lambda path: hf_stream.convert("dir", path),
    ],
    ids=["save_checkpoint", "save_nested", "convert"],
)
def test_files_of_others_are_not_written(here: Path, name: str, save: Callable[[str], Any]) -> None:
    with pytest.raises(
        CheckpointError, match=rf"'{name}' looks like an? .* which is not written; name a file that ends"
    ):
        save(name)
    assert left(here) == {"net.safetensors", "dir"}
    save(f"{name}/")
    assert (here / name).is_dir()


def test_gguf_files_are_called_what_they_are() -> None:
    Path("x.gguf").write_bytes(b"GGUF" + bytes(100))
    for read in (open_checkpoint, hf_stream.open_nested, lambda path: hf_stream.convert(path, "out.safetensors")):
        with pytest.raises(
            CheckpointError, match=r"'x.gguf' is a GGUF file, .* from_pretrained\('.', gguf_file='x.gguf'\)"
        ):
            read("x.gguf")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.safetensors", SafetensorsError),
        ("x.pt", PickleError),
        ("x.bin", PickleError),
        ("model.safetensors.index.json", IndexFileError),
    ],
)
def test_pointers_of_git_lfs_are_called_what_they_are(name: str, kind: type[FormatError]) -> None:
    Path("new").mkdir()
    Path("new", name).write_bytes(POINTER)
    with pytest.raises(kind, match=f"'new/{name}' is a Git LFS pointer and not the file itself: run 'git lfs pull'"):
        open_checkpoint(f"new/{name}")


def test_what_only_begins_like_a_pointer_is_none() -> None:
    Path("x.safetensors").write_bytes(POINTER + bytes(2000))
    with pytest.raises(SafetensorsError, match=r"header of .* the limit is"):
        open_checkpoint("x.safetensors")


def test_numbers_of_numpy_are_numbers() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    for number in (np.float64(2.5), np.float32(2.5), np.int64(3)):
        for op in (lambda x, n=number: x * n, lambda x, n=number: n * x, lambda x, n=number: x + n):
            lazily = op(hf_stream.LazyTensor.from_tensor(tensor))
            assert lazily.dtype == op(tensor).dtype
            assert torch.equal(lazily.materialize(), op(tensor))
    assert torch.equal(hf_stream.LazyTensor.from_tensor(tensor)[np.int64(1)].materialize(), tensor[np.int64(1)])


def test_a_layout_that_needs_to_be_called_once_more_says_so() -> None:
    with pytest.raises(
        HfStreamError, match=r"got a hf_stream.layouts.*; it makes a layout when it is called: pass what"
    ):
        hf_stream.convert("dir", "out", layout=lambda tensors: packed_gate_up())
