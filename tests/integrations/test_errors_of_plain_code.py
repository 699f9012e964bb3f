"""Where plain code raises, hf_stream raises what the same `except` catches: each line of the table in docs/errors."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import permissions
import pytest
import safetensors
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_stream
from hf_stream import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665f4a8\nsize 90868376\n"
OTHER = "model.norm.other"


@dataclass
class Place:
    """What a call is given.

    Attributes:
        directory: Of a checkpoint, or where to save.
        file: Its weights.
        model: A model that fits it, if nothing is wrong.
        tensors: What is to be loaded into that, or saved.
        size: Of shards.
    """

    directory: Path
    file: Path
    model: LlamaForCausalLM
    tensors: dict[str, torch.Tensor]
    size: str = "5GB"


def tensor_file(place: Place) -> Path:
    path = place.directory / "tensors.safetensors"
    safetensors.torch.save_file(place.tensors, path)
    return path


def save_file(place: Place) -> None:
    safetensors.torch.save_file(place.tensors, place.directory / "model.safetensors")


def opened(place: Place) -> Any:
    return hf_stream.open_checkpoint(place.file)


def opened_directory(place: Place) -> Any:
    return hf_stream.open_checkpoint(place.directory)


def loaded_into(place: Place) -> Any:
    return hf_stream.load_into(place.model, place.tensors)


def saved(place: Place) -> Any:
    return hf_stream.save_checkpoint(place.tensors, place.directory, max_shard_size=place.size)


Call = Callable[[Place], Any]
CALLS: dict[str, tuple[Call, tuple[Call, ...]]] = {
    "load_file": (
        lambda place: safetensors.torch.load_file(place.file),
        (opened, lambda place: hf_stream.open_nested(place.file), lambda place: hf_stream.verify(place.file, {})),
    ),
    "torch.load": (
        lambda place: torch.load(place.file, weights_only=True),
        (opened, lambda place: hf_stream.open_nested(place.file), lambda place: hf_stream.load_nested(place.file)),
    ),
    "load_torch_model": (
        lambda place: huggingface_hub.load_torch_model(place.model, place.directory),
        (opened_directory, lambda place: hf_stream.convert(place.directory, place.directory.parent / "converted")),
    ),
    "load_state_dict_from_file": (lambda place: huggingface_hub.load_state_dict_from_file(place.file), (opened,)),
    "from_pretrained": (
        lambda place: AutoModelForCausalLM.from_pretrained(place.directory),
        (
            lambda place: hf_stream.from_pretrained(AutoModelForCausalLM, place.directory),
            lambda place: hf_stream.AutoModelForCausalLM.from_pretrained(place.directory),
        ),
    ),
    "load_file(...)[name]": (
        lambda place: safetensors.torch.load_file(place.file)[OTHER],
        (lambda place: opened(place)[OTHER], lambda place: opened(place).facts(OTHER)),
    ),
    "torch.load(...)[name]": (
        lambda place: torch.load(place.file, weights_only=True)[OTHER],
        (lambda place: opened(place)[OTHER],),
    ),
    "safe_open(...).get_tensor": (
        lambda place: safetensors.safe_open(place.file, "pt").get_tensor(OTHER),
        (lambda place: opened(place)[OTHER],),
    ),
    "load_state_dict": (lambda place: place.model.load_state_dict(place.tensors), (loaded_into,)),
    "load_model": (lambda place: safetensors.torch.load_model(place.model, tensor_file(place)), (loaded_into,)),
    "save_file": (save_file, (saved,)),
    "save_torch_state_dict": (
        lambda place: huggingface_hub.save_torch_state_dict(place.tensors, place.directory, max_shard_size=place.size),
        (saved, lambda place: hf_stream.save_nested(place.tensors, place.directory, max_shard_size=place.size)),
    ),
    "save_pretrained": (
        lambda place: place.model.save_pretrained(place.directory, max_shard_size=place.size),
        (lambda place: hf_stream.save_pretrained(place.model, place.directory, max_shard_size=place.size),),
    ),
}


def nowhere(place: Place) -> None:
    place.directory /= "nowhere"
    place.file = place.directory / place.file.name


def without_weights(place: Place) -> None:
    place.file.unlink()


def without_a_shard(place: Place) -> None:
    shutil.rmtree(place.directory)
    place.model.save_pretrained(place.directory, max_shard_size="3KB")
    next(iter(sorted(place.directory.glob("*-00002-of-*")))).unlink()


def directory_for_file(place: Place) -> None:
    place.file.unlink()
    place.file.mkdir()


def link_to_nowhere(place: Place) -> None:
    place.file.unlink()
    place.file.symlink_to("nowhere")


def forbidden(place: Place) -> None:
    place.file.chmod(0)


def first_bytes(count: int) -> Callable[[Place], None]:
    return lambda place: place.file.write_bytes(place.file.read_bytes()[:count]) and None


def broken_header(place: Place) -> None:
    content = bytearray(place.file.read_bytes())
    content[8:20] = b"x" * 12
    place.file.write_bytes(content)


def index(content: str) -> Callable[[Place], None]:
    def write(place: Place) -> None:
        without_a_shard(place)
        (place.directory / "model.safetensors.index.json").write_text(content)

    return write


def legacy(count: int) -> Callable[[Place], None]:
    def write(place: Place) -> None:
        torch.save(place.model.state_dict(), place.file, _use_new_zipfile_serialization=False)
        first_bytes(count)(place)

    return write


def another_archive(place: Place) -> None:
    with zipfile.ZipFile(place.file, "w") as archive:
        archive.writestr("a/b", "x")


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def dangerous(place: Place) -> None:
    torch.save({"weight": Command()}, place.file)


def dangerous_alone(place: Place) -> None:
    place.file.write_bytes(pickle.dumps(Command(), protocol=2))


def one_more(place: Place) -> None:
    place.tensors[OTHER] = torch.ones(1)


def another_shape(place: Place) -> None:
    place.tensors["model.norm.weight"] = torch.ones(2, 2)


def onto_file(place: Place) -> None:
    place.directory = place.directory / "config.json"


def below_file(place: Place) -> None:
    place.directory = place.directory / "config.json" / "x"


def into_forbidden(place: Place) -> None:
    place.directory.chmod(0o500)
    place.directory /= "new"


def long_name(place: Place) -> None:
    place.directory /= "x" * 300


def words(place: Place) -> None:
    place.size = "5 gigabytes"


FAULTS: dict[str, Callable[[Place], Any]] = {
    "path that is not there": nowhere,
    "directory without weights": without_weights,
    "shard that is missing": without_a_shard,
    "directory in the place of the file": directory_for_file,
    "link to nowhere": link_to_nowhere,
    "no permission to read": forbidden,
    "header that is cut short": first_bytes(100),
    "header that is no JSON": broken_header,
    "tensors that are cut short": first_bytes(-100),
    "empty file": first_bytes(0),
    "pointer of Git LFS": lambda place: place.file.write_bytes(POINTER),
    "index that is no JSON": index("{nonsense"),
    "index without a weight map": index("{}"),
    "`.bin` file that is cut short": first_bytes(-1000),
    "`.bin` file from before torch 1.6 that is cut short": legacy(-500),
    "`.bin` file that is a zip archive of something else": another_archive,
    "`.bin` file of random bytes": lambda place: place.file.write_bytes(b"\0random" * 100),
    "pickle that is cut short": legacy(500),
    "pickle that would run code": dangerous,
    "pickle alone that would run code": dangerous_alone,
    "name that no tensor has": lambda place: None,
    "tensor that the module has not": one_more,
    "tensor of another shape": another_shape,
    "destination that is a file": onto_file,
    "destination below a file": below_file,
    "no permission to write": into_forbidden,
    "destination whose name is too long": long_name,
    "shard size in words": words,
}


def rows() -> list[tuple[str, str, str, str]]:
    """Fault, plain call, what that raises, and what hf_stream raises."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if len(cells) == 4 and not cells[0].startswith(("what", "---")):
            found += [(cells[0], call, cells[2], cells[3]) for call in re.findall(r"`([^`]+)`", cells[1])]
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("good")
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2))
    model.save_pretrained(top / "safetensors")
    shutil.copytree(top / "safetensors", top / "bin")
    (top / "bin/model.safetensors").unlink()
    torch.save(model.state_dict(), top / "bin/pytorch_model.bin")
    return top


def place_for(checkpoints: Path, top: Path, fault: str, call: str) -> Place:
    kind = "bin" if call.startswith("torch.load") or ".bin" in fault or "pickle" in fault else "safetensors"
    shutil.copytree(checkpoints / kind, top)
    model = LlamaForCausalLM.from_pretrained(checkpoints / "safetensors")
    file = top / ("pytorch_model.bin" if kind == "bin" else "model.safetensors")
    return Place(top, file, model, {name: tensor.clone() for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize(("fault", "call", "raises", "ours"), rows())
def test_the_same_except_catches_it(
    fault: str, call: str, raises: str, ours: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, calls = CALLS[call]
    for number, attempt in enumerate([plain, *calls]):
        place = place_for(checkpoints, tmp_path / str(number), fault, call)
        FAULTS[fault](place)
        with permissions.in_force(), pytest.raises(Exception) as caught:
            attempt(place)
        if attempt is plain:
            wanted = type(caught.value)
            assert f"`{wanted.__name__}`" in raises, caught.value
        elif ours == "the same":
            assert type(caught.value) is wanted
        else:
            assert isinstance(caught.value, wanted), caught.value
            assert type(caught.value) is getattr(errors, ours.strip("`"))
    assert not Path("was-run").exists()


def test_the_table_names_every_class_and_every_fault() -> None:
    assert {fault for fault, *_ in rows()} == FAULTS.keys()
    assert {call for _, call, *_ in rows()} == CALLS.keys()


TREE = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.HfStreamError)]


@pytest.mark.parametrize("cls", TREE)
def test_an_error_is_its_message_and_goes_through_a_pickle(cls: type[errors.HfStreamError]) -> None:
    error = cls("'x' is wrong: 1 + 1; mend it")
    again = pickle.loads(pickle.dumps(error))
    assert str(error) == str(again) == "'x' is wrong: 1 + 1; mend it"
    assert type(again) is cls
    assert (
        f"|-- {cls.__name__}" in (errors.__doc__ or "")
        or f"`-- {cls.__name__}" in (errors.__doc__ or "")
        or cls is TREE[0]
    )


def test_what_the_system_has_said_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError) as caught:
        hf_stream.save_checkpoint({"w": torch.ones(1)}, tmp_path / "file" / "below")
    assert caught.value.errno == 20
    assert caught.value.strerror == "Not a directory"
