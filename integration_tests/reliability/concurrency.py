"""Campaign: several processes save to one directory, and others read one checkpoint there, or get an error."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from campaign import Campaign
from forks import forked
from readers import is_ours
from safetensors.torch import load_file
from scenarios import QUIET, llama, plain_model

import hf_stream

SECONDS = 3  # of each round in a short run
READS = 3  # that must have given a checkpoint, if the round is to count


class Pauses:
    """Lets others do something between two steps of a read."""

    def update(self, n: int) -> None:
        time.sleep(0.005)


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        seconds = 30.0 if campaign.long else SECONDS
        plain_model(campaign.folder / "warm", 1.0, "sharded")
        _from_pretrained(campaign.folder / "warm")
        for name, (writers, readers) in ROUNDS.items():
            if campaign.wanted(name):
                meet(campaign, name, writers, readers, seconds)
        return campaign.end()


def meet(campaign: Campaign, name: str, writers: Sequence[Any], readers: dict[str, Any], seconds: float) -> None:
    """Let writers and readers meet in one directory for a while."""
    place = campaign.folder / name
    plain_model(place, 1.0, "sharded")
    processes = [_start(lambda write=write: _again(write, place)) for write in writers]  # type: ignore[misc]
    try:
        for reader, read in readers.items():
            ended = forked(lambda read=read: _read_for(read, place, seconds / len(readers)), 60 + seconds, quiet=True)  # type: ignore[misc]
            if ended.value is None:
                campaign.case(f"{name}: {reader}", [str(ended)])
                continue
            whole, wrong = ended.value
            print(f"{name}: {reader} has read {whole} whole checkpoints")
            campaign.case(f"{name}: {reader}", wrong or ([] if whole >= READS else [f"it has read {whole} only"]))
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    hf_stream.save_checkpoint({"x": torch.ones(1)}, place, **QUIET)
    left = sorted(path.name for path in place.iterdir() if path.suffix == ".hf-stream" or path.name == ".hf-stream")
    campaign.case(f"{name}: the next save", [f"it leaves {left}"] if left else [])


def _start(act: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        try:
            act()
        finally:
            os._exit(1)
    return pid


def _again(write: Callable[[Path], object], place: Path) -> None:
    while True:
        try:
            write(place)
        except hf_stream.CheckpointError:  # somebody else saves
            time.sleep(0.001)


def _read_for(read: Callable[[Path], set[float]], place: Path, seconds: float) -> tuple[int, list[str]]:
    whole = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or (whole < READS and time.monotonic() < deadline + 30):
        try:
            values = read(place)
        except (hf_stream.HfStreamError, OSError):
            continue
        except Exception as error:
            if is_ours(error):
                raise
            continue
        if len(values) != 1:
            return whole, [f"it has read {sorted(values)} together"]
        whole += 1
    return whole, []


def _values(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {float(value) for tensor in tensors.values() for value in tensor.unique()}


def _opened(place: Path) -> set[float]:
    checkpoint = hf_stream.open_checkpoint(place)
    return _values({name: tensor.materialize() for name, tensor in checkpoint.items()})


def _from_pretrained(place: Path) -> set[float]:
    from transformers import AutoModelForCausalLM

    model = hf_stream.from_pretrained(AutoModelForCausalLM, place, local_files_only=True, progress=Pauses())
    return _values(dict(model.state_dict()))


def _by_transformers(place: Path) -> set[float]:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True, local_files_only=True)
    if info["missing_keys"]:
        raise OSError("it lacks weights, and says so")
    return _values(dict(model.state_dict()))


def _each_file(place: Path) -> set[float]:
    """Each file is whole by itself, whoever wrote it: all values of the first that is not."""
    values: set[float] = set()
    for path in place.glob("*.safetensors"):
        values = _values(load_file(path))
        if len(values) != 1:
            break
    else:
        return values or {0.0}
    return values


def _saver(value: float, size: int) -> Callable[[Path], object]:
    tensors = llama(value).state_dict()
    return lambda place: hf_stream.save_checkpoint(tensors, place, max_shard_size=size, **QUIET)


def _pretrained_saver(value: float) -> Callable[[Path], object]:
    model = llama(value)
    return lambda place: hf_stream.save_pretrained(model, place, max_shard_size=9000, **QUIET)


# Plain readers cannot know a file from another one of the same name: for them the two have other numbers of shards.
ROUNDS: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {
    "same names": (
        (_saver(1.0, 9000), _saver(2.0, 9000)),
        {"open_checkpoint": _opened, "from_pretrained": _from_pretrained},
    ),
    "other names": (
        (_saver(1.0, 12000), _saver(2.0, 5000)),
        {"open_checkpoint": _opened, "transformers": _by_transformers, "safetensors": _each_file},
    ),
    "save_pretrained": (
        (_pretrained_saver(1.0), _pretrained_saver(2.0)),
        {"from_pretrained": _from_pretrained, "safetensors": _each_file},
    ),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
