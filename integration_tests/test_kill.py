"""Processes that are killed while they convert or save: what they leave, and what the next run makes of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_stream
from hf_stream.checkpoint import settle

CHILDREN = str(Path(__file__).with_name("children.py"))
MIB = 1 << 20


def run(name: str, *arguments: object) -> str:
    """Run a function of children.py to its end and return what it prints."""
    command = [sys.executable, CHILDREN, name, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


class Counter:
    """Counts bytes written."""

    nbytes = 0

    def update(self, n: int) -> None:
        self.nbytes += n


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 tensors of 1 MiB, in files of four; written two by two they make twelve shards."""
    directory = tmp_path_factory.mktemp("source") / "a"
    tensors = {f"t{n}": torch.randint(0, 256, (MIB,), dtype=torch.uint8) for n in range(24)}
    hf_stream.save_checkpoint(tensors, directory, max_shard_size=4 * MIB)
    (directory / "config.json").write_text("{}")
    hf_stream.convert(directory, directory.with_name("wanted"), max_shard_size=2 * MIB)
    return directory


@pytest.mark.parametrize("exists", [False, True])
def test_a_killed_conversion_goes_on_where_it_stopped(source: Path, tmp_path: Path, exists: bool) -> None:
    wanted = contents(source.with_name("wanted"))
    old = {"old": torch.ones(3)}
    for turn, moves in enumerate([1, 2, 5, 9, 12]):
        out = tmp_path / str(turn)
        if exists:
            hf_stream.save_checkpoint(old, out)
        command = [sys.executable, CHILDREN, "convert_and_stop", str(source), str(out), str(2 * MIB), str(moves)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"stopped\n"
            # The shard that it stopped at is not finished; those before go to the disk meanwhile.
            staged = (out / ".hf-stream" if exists else tmp_path / f".{turn}.hf-stream") / "files"
            while len(list(staged.glob("*.safetensors"))) < moves - 1:
                assert child.poll() is None
                time.sleep(0.01)
            child.kill()
        assert child.returncode < 0
        if exists:
            assert not hf_stream.verify(old, out)
        else:
            assert not out.exists()
        kept = {path.name: path.stat().st_ino for path in staged.glob("*.safetensors")}
        assert len(kept) == moves - 1
        assert all(wanted[name] == (staged / name).read_bytes() for name in kept)
        written = Counter()
        hf_stream.convert(source, out, max_shard_size=2 * MIB, progress=written)
        assert contents(out) == wanted
        assert written.nbytes == (12 - len(kept)) * 2 * MIB
        assert {name: (out / name).stat().st_ino for name in kept} == kept
        assert {path.name for path in tmp_path.iterdir()} == {str(n) for n in range(turn + 1)}
        assert not (out / ".hf-stream").exists()


@pytest.fixture(scope="module")
def model_of_ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory


def values_by_safetensors(directory: Path) -> set[float]:
    """The different values in every file that can be loaded by itself: each has to be whole."""
    files = list(directory.glob("*.safetensors"))
    return {float(value) for file in files for tensor in load_file(file).values() for value in tensor.unique()}


def values_by_transformers(directory: Path) -> set[float] | None:
    from transformers import LlamaForCausalLM

    try:
        model, info = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    except OSError:  # no weights there
        return None
    assert not info["missing_keys"]
    return {float(value) for tensor in model.state_dict().values() for value in tensor.unique()}


def values_by_us(directory: Path) -> set[float] | None:
    try:
        checkpoint = hf_stream.open_checkpoint(directory)
    except hf_stream.CheckpointError:
        return None
    return {float(value) for tensor in checkpoint.values() for value in tensor.materialize().unique()}


@pytest.mark.parametrize(
    ("before", "after"), [(4000, 4000), (4000, 10**9), (10**9, 4000), (6000, 3000), (10**9, 10**9)]
)
def test_a_save_killed_at_any_change_never_leaves_a_mixture(
    model_of_ones: Path, tmp_path: Path, before: int, after: int
) -> None:
    template = tmp_path / "template"
    hf_stream.convert(model_of_ones, template, max_shard_size=before)
    count = int(run("save_until_killed", template, tmp_path, 2, after))
    assert count >= 10
    outcomes = []
    for limit in range(count + 1):
        directory = tmp_path / str(limit)
        assert values_by_safetensors(directory) in ({1.0}, {2.0}, set())
        assert values_by_transformers(directory) in ({1.0}, {2.0}, None)
        loaded = values_by_us(directory)
        assert loaded in ({1.0}, {2.0}, None)
        settle(directory)
        settled = values_by_us(directory)
        assert settled == values_by_transformers(directory)
        assert settled == (loaded or {2.0})
        hf_stream.save_checkpoint({"x": torch.ones(1)}, directory)  # whatever is there, the next save works
        assert list(hf_stream.open_checkpoint(directory)) == ["x"]
        assert not (directory / ".hf-stream").exists()
        outcomes.append(loaded)
    assert outcomes[0] == {1.0}
    in_one_step = before == after == 10**9  # one file in the place of one file
    assert (None in outcomes) == (not in_one_step)
    assert outcomes[-1] == {2.0}


@pytest.mark.parametrize(("file", "size"), [("s.safetensors", 0), ("new.safetensors", 0), ("new", 8000), (".", 8000)])
def test_a_nested_state_killed_at_any_change_is_the_old_or_the_new_one(tmp_path: Path, file: str, size: int) -> None:
    template = tmp_path / "template"
    old = {f"t{n}": [torch.ones(1000), 1] for n in range(6)}
    exists = not file.startswith("new")
    hf_stream.save_nested(old, template / (file if exists else "other"), max_shard_size=9000 if file == "." else None)
    count = int(run("save_nested_until_killed", template, tmp_path, 2, file, size))
    assert count >= 5
    outcomes = []
    for limit in range(count + 1):
        place = tmp_path / str(limit) / file
        try:
            state = hf_stream.load_nested(place)
        except hf_stream.CheckpointError:
            outcomes.append(None)
            assert file == "." or not place.exists()
        else:
            (value,) = {number for _, number in state.values()}
            assert all(torch.equal(tensor, torch.full((1000,), float(value))) for tensor, _ in state.values())
            outcomes.append(value)
        hf_stream.save_nested(old, place)  # whatever is there, the next save works
        assert hf_stream.load_nested(place).keys() == old.keys()
    assert outcomes[0] == (1 if exists else None)
    assert outcomes[-1] == 2
    assert set(outcomes) == ({1, 2} if file == "s.safetensors" else {1, 2, None} if exists else {None, 2})


def llama_of_meta(layers: int, value: float) -> dict[str, torch.Tensor]:
    shapes = {"tok_embeddings.weight": (8, 8), "norm.weight": (8,), "output.weight": (8, 8)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.attention.w{x}.weight": (8, 8) for x in "qkvo"}
        shapes |= {f"layers.{layer}.feed_forward.w{x}.weight": (8, 8) for x in "123"}
        shapes |= {f"layers.{layer}.{norm}_norm.weight": (8,) for norm in ("attention", "ffn")}
    return {name: torch.full(shape, value) for name, shape in shapes.items()}


def test_partitions_killed_at_any_change_are_never_a_mixture(tmp_path: Path) -> None:
    for layers, value in ((2, 1.0), (1, 2.0)):
        torch.save(llama_of_meta(layers, value), tmp_path / f"{layers}.pth")
    layout = hf_stream.layouts.swift_transformer(2, head_dim=4)
    hf_stream.convert(tmp_path / "2.pth", tmp_path / "template", layout=layout)
    hf_stream.convert(tmp_path / "1.pth", tmp_path / "wanted", layout=layout)
    old, new = contents(tmp_path / "template"), contents(tmp_path / "wanted")
    count = int(run("convert_to_partitions_until_killed", tmp_path / "template", tmp_path, tmp_path / "1.pth"))
    assert count >= 50
    outcomes = []
    for limit in range(count + 1):
        directory = tmp_path / str(limit)
        # As a loader sees it that knows nothing of us, and opens file after file.
        left = contents(directory)
        assert left.items() <= old.items() or left.items() <= new.items()
        loaded = values_by_us(directory)
        assert loaded in ({1.0}, {2.0}, None)
        settle(directory)
        assert contents(directory) == (new if loaded is None else left)
        outcomes.append(loaded)
    assert outcomes[0] == {1.0}
    assert None in outcomes
    assert outcomes[-1] == {2.0}
