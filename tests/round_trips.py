"""One model through plain transformers and through hf_stream, side by side: what is loaded, what is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

import hf_stream
from hf_stream.checkpoint.save import write_files
from hf_stream.integrations.transformers import load, save
from hf_stream.integrations.transformers.load import materialize_model
from hf_stream.lazy import LazyTensor, reads
from hf_stream.lazy.sources import Output, Tiles

LOADS: dict[str, dict[str, Any]] = {
    "as saved": {},
    "float16": {"dtype": torch.float16},
    "partial, float32": {"dtype": torch.float32},
    "device_map": {"device_map": "cpu"},
}
SEED = 11


class PlainFailureError(Exception):
    """Plain transformers itself does not save, reload or reproduce a model; says why."""


def differences(model: PreTrainedModel, folder: Path, loads: Collection[str] = tuple(LOADS)) -> Iterator[str]:
    """What hf_stream does differently from plain transformers with a model, in words; nothing if nothing.

    Args:
        model: A model on the CPU, whose every parameter and persistent buffer has other values.
        folder: An empty directory, to save in.
        loads: Which of `LOADS` to try; the last one is saved again.

    Raises:
        PlainFailureError: Plain transformers fails; if only in that it gives other values back, then at the end.
    """
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor))
    for name, size in (("single", "50GB"), ("sharded", max(nbytes // 3, 1))):
        _plainly("save", lambda: model.save_pretrained(folder / name, max_shard_size=size))  # noqa: B023
        hf_stream.save_pretrained(model, folder / "ours", max_shard_size=size)
        yield from (f"save, {name}: {words}" for words in different_files(folder / "ours", folder / name, model))
        shutil.rmtree(folder / "ours")
        if hasattr(model, "load_speakers"):
            torch.save({}, folder / name / "spk_dict.pt")  # Qwen2.5-Omni reads it and does not write it
    _leave_some_out(folder / "single", folder / "partial", model)
    cls, lost = type(model), ""
    for name in loads:
        arguments = LOADS[name]
        path = folder / {"device_map": "sharded", "partial, float32": "partial"}.get(name, "single")
        plain, plain_info = _plainly("reload", lambda: _load(cls, cls, path, arguments))  # noqa: B023
        lost = lost or ("" if "partial" in name else _lost(plain, model))
        ours, our_info = _load(None, cls, path, arguments)
        found = list(different_models(ours, plain))
        if found:
            again, _ = _load(cls, cls, path, arguments)
            for arbitrary in different_models(again, plain):
                raise PlainFailureError(f"plain transformers does not load the same twice: {arbitrary}")
        yield from (f"load, {name}: {words}" for words in found)
        if our_info != plain_info:
            yield f"load, {name}: the loading info is {our_info}, not {plain_info}"
        if path.name == "single" and "dtype" in arguments:
            yield from (f"convert, {name}: {words}" for words in _different_casts(plain, path, arguments["dtype"]))
    plain.save_pretrained(folder / "again")
    hf_stream.save_pretrained(ours, folder / "ours")
    yield from (f"save, reloaded: {words}" for words in different_files(folder / "ours", folder / "again", plain))
    if lost:
        raise PlainFailureError(f"plain transformers does not give '{lost}' back")


def wasted_reads(model: PreTrainedModel, folder: Path) -> Iterator[str]:
    """Where the conversions of a saved or loaded model compute, or read more than is asked for, in words.

    Args:
        model: The model.
        folder: What plain transformers has saved of it.
    """
    found: list[str] = []

    def of_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if isinstance(tensor, LazyTensor):
                found.extend(f"'{name}': {words}" for words in _wasted(tensor))

    def of_model(loaded: Any, *args: Any, **kwargs: Any) -> None:
        of_tensors({**dict(loaded.named_parameters()), **dict(loaded.named_buffers())})
        materialize_model(loaded, *args, **kwargs)

    def of_files(staging: Any, files: Any, tensors: Mapping[str, torch.Tensor], **kwargs: Any) -> None:
        of_tensors(tensors)
        write_files(staging, files, tensors, **kwargs)

    with mock.patch.object(load, "materialize_model", of_model), mock.patch.object(save, "write_files", of_files):
        hf_stream.from_pretrained(type(model), folder, dtype=torch.float16)
        yield from (f"load: {words}" for words in found)
        found.clear()
        hf_stream.save_pretrained(model, folder.with_name("watched"))
        yield from (f"save: {words}" for words in found)


def _wasted(lazy: LazyTensor) -> Iterator[str]:
    todo, seen = [lazy._source], set()
    while todo:
        source = todo.pop()
        if isinstance(source, Output):
            yield f"computed by {source.compute.func}"
        elif isinstance(source, Tiles) and source not in seen:
            seen.add(source)
            todo.extend(part.source for part in source.parts)
    slices = [lazy.narrow(dim, n // 2, 1) for dim, n in enumerate(lazy.shape) if n > 1]
    for piece in [lazy, *slices]:
        read = sum(region.numel for region in reads([piece]))
        if read > piece.numel():
            yield f"{read} elements are read for {piece.numel()}"


def different_models(ours: PreTrainedModel, plain: PreTrainedModel) -> Iterator[str]:
    """How the parameters, buffers, ties and configs of two models differ, in words."""
    if type(ours) is not type(plain) or ours.training is not plain.training:
        yield f"{type(ours).__name__}, training {ours.training}"
    for kind in ("named_parameters", "named_buffers"):
        a = dict(getattr(ours, kind)(remove_duplicate=False))
        b = dict(getattr(plain, kind)(remove_duplicate=False))
        if list(a) != list(b):
            yield f"{kind} are {sorted(set(a) ^ set(b))[:4]} off, or in another order"
            continue
        for name in a:
            if _facts(a[name]) != _facts(b[name]):
                yield f"'{name}' is {_facts(a[name])}, not {_facts(b[name])}"
            elif not same_bits(a[name], b[name]):
                yield f"'{name}' has other values"
        if _ties(a) != _ties(b):
            yield f"{kind} are tied as {_ties(a)}, not {_ties(b)}"
    for name, module in ours.named_modules():
        # Recurrent layers have a list of their weights, others may have caches.
        yield from (f"'{name}' holds a lazy in {slot}" for slot, held in vars(module).items() if _holds_lazy(held))
    if ours.config.to_dict() != plain.config.to_dict():
        yield "the config differs"
    generation = [getattr(model, "generation_config", None) for model in (ours, plain)]
    if str(generation[0]) != str(generation[1]):
        yield "the generation config differs"


def _holds_lazy(held: Any) -> bool:
    if isinstance(held, dict):
        held = list(held.values())
    return any(map(_holds_lazy, held)) if isinstance(held, list | tuple) else isinstance(held, LazyTensor)


def different_files(ours: Path, plain: Path, model: PreTrainedModel) -> Iterator[str]:
    """How two directories differ, in words. Tensors that a conversion makes may be spread over other shards."""
    a, b = _contents(ours), _contents(plain)
    if a == b:
        return
    if not has_converters(model):
        yield f"{sorted(set(a) ^ set(b)) or [name for name in a if a[name] != b[name]]} differ"
        return
    small = {name for name in {*a, *b} if ".safetensors" not in name and a.get(name) != b.get(name)}
    if small:
        yield f"{sorted(small)} differ"
    x, y = (dict(_tensors(folder)) for folder in (ours, plain))
    if set(x) != set(y):
        yield f"the tensors are {sorted(set(x) ^ set(y))[:4]} off"
        return
    yield from (f"'{name}' is stored with other values" for name in x if not same_bits(x[name], y[name]))
    indices = [json.loads(files.get("model.safetensors.index.json", b"null")) for files in (a, b)]
    if all(indices):
        if indices[0]["metadata"] != indices[1]["metadata"]:
            yield f"the index has {indices[0]['metadata']}, not {indices[1]['metadata']}"
        stored = {name: file.name for file in ours.glob("*.safetensors") for name in load_file(file)}
        if indices[0]["weight_map"] != stored:
            yield "the index does not say where the tensors are"
    elif any(indices) or len(x) == 1:
        yield "only one of them has an index"


def _different_casts(plain: PreTrainedModel, path: Path, dtype: torch.dtype) -> Iterator[str]:
    """How what `convert` makes of a checkpoint differs from the same loaded with a dtype, and saved, in words."""
    saved, converted = path.with_name("cast"), path.with_name("converted")
    _plainly("save", lambda: plain.save_pretrained(saved))
    hf_stream.convert(path, converted, dtype=dtype)
    x, y = dict(_tensors(converted)), dict(_tensors(saved))
    if set(x) != set(y):
        yield f"the tensors are {sorted(set(x) ^ set(y))[:4]} off"
    for name in sorted(x.keys() & y.keys()):
        # Of a counter in a module that it keeps in float32, transformers makes a float32; ours stays what it is.
        ours = x[name] if x[name].is_floating_point() else x[name].to(y[name].dtype)
        if not same_bits(ours, y[name]):
            yield f"'{name}' is {x[name].dtype}, not {y[name].dtype}, or has other values"


def has_converters(model: PreTrainedModel) -> bool:
    """Whether saving a model reverts a conversion that does more than to rename."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal to the last bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (tensor.detach().contiguous().reshape(-1) for tensor in (a, b))
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.numel() else True


def _leave_some_out(whole: Path, partial: Path, model: PreTrainedModel) -> None:
    """A checkpoint that lacks every fourth tensor that no conversion needs: transformers initialises those."""
    shutil.copytree(whole, partial)
    file = partial / "model.safetensors"
    own = model.state_dict()
    stored = enumerate(load_file(file).items())
    kept = {name: tensor for place, (name, tensor) in stored if place % 4 != 1 or name not in own}
    file.unlink()
    save_file(kept, file, {"format": "pt"})


def _load(plain: Any, cls: Any, path: Path, arguments: dict[str, Any]) -> tuple[PreTrainedModel, Any]:
    """A model and its loading info, where its class does not stand before that with a `from_pretrained` of its own."""
    torch.manual_seed(SEED)
    informs = cls.from_pretrained.__func__ is PreTrainedModel.from_pretrained.__func__
    if informs:
        arguments = {**arguments, "output_loading_info": True}
    # What transformers takes as it comes and initialises with nothing is filled with NaN then, the same each time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        loaded = cls.from_pretrained(path, **arguments) if plain else hf_stream.from_pretrained(cls, path, **arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    return loaded if informs else (loaded, None)


def _plainly(what: str, call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        raise PlainFailureError(f"plain transformers fails to {what} it: {type(error).__name__}: {error}") from error


def _lost(plain: PreTrainedModel, model: PreTrainedModel) -> str:
    """The first tensor that a reloaded model does not have as it was, if there is one."""
    before, after = model.state_dict(), plain.state_dict()
    for name, tensor in before.items():
        if isinstance(tensor, torch.Tensor) and not (
            name in after and same_bits(tensor.to(after[name].dtype), after[name])
        ):
            return name
    return ""


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad)


def _ties(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    return {frozenset(names) for names in tied.values() if len(names) > 1}


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()
