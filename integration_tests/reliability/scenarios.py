"""Saves and conversions that the campaigns interrupt: what is there before, and what is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import readers
import torch
from readers import Reader

import hf_stream

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

QUIET = {"progress": False}
SHARDED = 9000  # bytes: three shards for the model below


@dataclass(frozen=True)
class Scenario:
    """Something that is done to `top / out`.

    Attributes:
        prepare: Puts there what is there before.
        act: What is interrupted; doing it twice is like doing it once.
        readers: What others read there: the old state, the new one or an error.
        many: Whether the place holds many checkpoints, each of which is all or nothing.
    """

    name: str
    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    readers: tuple[Reader, ...] = (readers.opened,)
    out: str = "out"
    many: bool = False


def llama(value: float) -> Any:
    """A small model full of one value, which its config tells as well."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        initializer_range=value / 4,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def plain_model(directory: Path, value: float, kind: str) -> None:
    """What plain transformers leaves: in one file, in shards, or pickled, as older versions did."""
    model = llama(value)
    model.save_pretrained(directory, max_shard_size=SHARDED if kind == "sharded" else "1GB")
    if kind == "bin":
        (directory / "model.safetensors").unlink()
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
    elif kind == "sharded bin":
        (directory / "model.safetensors").unlink()
        state = model.state_dict()
        names = dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")
        torch.save(state, directory / "pytorch_model-00001-of-00001.bin")
        index = {"metadata": {"total_size": 1}, "weight_map": names}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def with_sidecars(directory: Path, value: float) -> None:
    (directory / "tokenizer.json").write_text(json.dumps({"of": value}))
    (directory / "notes.txt").write_text("stays")


def _nothing(top: Path) -> None:
    pass


def _old(kind: str, top: Path) -> None:
    plain_model(top / "out", 1.0, kind)
    with_sidecars(top / "out", 1.0)


def _source(kind: str | None, top: Path) -> None:
    plain_model(top / "source", 2.0, "sharded")
    with_sidecars(top / "source", 2.0)
    if kind is not None:
        _old(kind, top)


def _save(size: int | str, top: Path) -> None:
    hf_stream.save_checkpoint(llama(2.0).state_dict(), top / "out", max_shard_size=size, **QUIET)


def _convert(top: Path) -> None:
    hf_stream.convert(top / "source", top / "out", max_shard_size=12000, **QUIET)


def _write(top: Path) -> None:
    tensors = llama(2.0).state_dict()
    with hf_stream.CheckpointWriter(top / "out", tensors, max_shard_size=SHARDED) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def _save_pretrained(size: int | str, top: Path) -> None:
    hf_stream.save_pretrained(llama(2.0), top / "out", max_shard_size=size, **QUIET)


def _nested(value: int, out: str, size: int | None, top: Path) -> None:
    state = {f"t{n}": [torch.full((1000,), float(value)), value] for n in range(4)}
    hf_stream.save_nested(state, top / out, max_shard_size=size, **QUIET)


def _llama_of_meta(layers: int, value: float) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (8, 8), "norm.weight": (8,), "output.weight": (8, 8)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.attention.w{x}.weight": (8, 8) for x in "qkvo"}
        shapes |= {f"layers.{layer}.feed_forward.w{x}.weight": (8, 8) for x in "123"}
        shapes |= {f"layers.{layer}.{norm}_norm.weight": (8,) for norm in ("attention", "ffn")}
    return {name: torch.full(shape, value) for name, shape in shapes.items()}


def _partitions(source: str, top: Path) -> None:
    layout = hf_stream.layouts.swift_transformer(2, head_dim=4)
    hf_stream.convert(top / source, top / "out", layout=layout, **QUIET)


def _before_partitions(top: Path) -> None:
    torch.save(_llama_of_meta(2, 1.0), top / "1.pth")
    torch.save(_llama_of_meta(1, 2.0), top / "2.pth")
    _partitions("1.pth", top)


def _adapter(value: float, rank: int) -> Any:
    import peft

    model = peft.get_peft_model(llama(value), peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _old_adapter(top: Path) -> None:
    _adapter(1.0, 2).save_pretrained(top / "out")


def _save_adapter(top: Path) -> None:
    hf_stream.save_pretrained(_adapter(2.0, 4), top / "out", **QUIET)


def trainer_checkpoint(step: int, top: Path, streaming: bool = True, out: str = "out") -> None:
    """Save the checkpoint of a step, of which one is to be left."""
    from trainings import llama as trained
    from trainings import trainer

    callbacks = [hf_stream.StreamingCheckpointCallback()] if streaming else []
    run = trainer(trained(seed=step), top / out, *callbacks, save_total_limit=1)
    run.create_optimizer_and_scheduler(4)
    run.state.global_step = step
    torch.manual_seed(step)
    run._save_checkpoint(run.model, trial=None)


_BOTH = (readers.opened, readers.transformers)
_NESTED = (readers.nested,)
_OLD = partial(_nested, 1)
_NEW = partial(_nested, 2)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("save into a new directory", _nothing, partial(_save, SHARDED)),
        Scenario("save shards over one file", partial(_old, "single"), partial(_save, SHARDED), _BOTH),
        Scenario("save one file over shards", partial(_old, "sharded"), partial(_save, "1GB"), _BOTH),
        Scenario("save shards over shards", partial(_old, "sharded"), partial(_save, 12000), _BOTH),
        Scenario("save shards over a .bin", partial(_old, "bin"), partial(_save, SHARDED), _BOTH),
        Scenario("writer over shards", partial(_old, "sharded"), _write, _BOTH),
        Scenario("nested file, new", _nothing, partial(_NEW, "s.safetensors", None), _NESTED, "s.safetensors"),
        Scenario(
            "nested file over another",
            partial(_OLD, "s.safetensors", None),
            partial(_NEW, "s.safetensors", None),
            _NESTED,
            "s.safetensors",
        ),
        Scenario("nested folder, new", _nothing, partial(_NEW, "out", 9000), _NESTED),
        Scenario("nested folder over another", partial(_OLD, "out", 5000), partial(_NEW, "out", 9000), _NESTED),
        Scenario("convert into a new directory", partial(_source, None), _convert, _BOTH),
        Scenario("convert over shards", partial(_source, "sharded"), _convert, _BOTH),
        Scenario("convert over a .bin", partial(_source, "sharded bin"), _convert, _BOTH),
        Scenario("save_pretrained, new", _nothing, partial(_save_pretrained, "1GB"), _BOTH),
        Scenario("save_pretrained over a .bin", partial(_old, "bin"), partial(_save_pretrained, "1GB"), _BOTH),
        Scenario("save_pretrained over shards", partial(_old, "sharded"), partial(_save_pretrained, SHARDED), _BOTH),
        Scenario("partitions over others", _before_partitions, partial(_partitions, "2.pth"), ()),
        Scenario("adapter over another", _old_adapter, _save_adapter, (readers.adapter,)),
        Scenario(
            "Trainer, one checkpoint is kept",
            partial(trainer_checkpoint, 1),
            partial(trainer_checkpoint, 2),
            (),
            many=True,
        ),
    )
}
