"""Campaign: few descriptors, little memory, small files, no locks, and children that leave in the middle."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import trees
from calls import LOCKS, Watch, fail_all
from campaign import Campaign
from forks import forked
from judging import Truth, find_truth, fresh, prepared, warm
from safetensors.torch import load_file, save_file
from scenarios import QUIET, SCENARIOS, Scenario

import hf_stream

MIB = 1 << 20
SHARDS = 492
FEW = 4  # scenarios without locks in a short run


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        few_descriptors(campaign)
        little_memory(campaign)
        small_files(campaign)
        no_locks(campaign)
        children(campaign)
        return campaign.end()


def _case(campaign: Campaign, label: str, attempt: Callable[[], list[str] | None]) -> None:
    if campaign.wanted(label):
        ended = forked(attempt, quiet=True)
        campaign.case(label, ended.value or [str(ended)] if ended.value or ended.error or ended.signal else [])


def few_descriptors(campaign: Campaign) -> None:
    """492 shards, and 64 descriptors."""
    source, top = campaign.folder / "many", campaign.folder / "few"
    tensors = {f"t{n}": torch.full((64,), float(n)) for n in range(SHARDS)}
    source.mkdir()
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        save_file({name: tensor}, source / f"model-{number:05}-of-{SHARDS:05}.safetensors", {"format": "pt"})

    def check(place: Path) -> list[str]:
        differences = hf_stream.verify(tensors, place)
        return [str(differences)] if differences else []

    def limited(act: Callable[[], object], place: Path) -> list[str]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        act()
        return check(place)

    acts: dict[str, Callable[[], object]] = {
        "open": lambda: hf_stream.materialize(hf_stream.open_checkpoint(source)),
        "verify": lambda: hf_stream.verify(source, source),
        "convert to as many shards": lambda: hf_stream.convert(source, top, max_shard_size=256, **QUIET),
        "convert to one file": lambda: hf_stream.convert(source, top, max_shard_size="1GB", **QUIET),
        "save as many shards": lambda: hf_stream.save_checkpoint(tensors, top, max_shard_size=256, **QUIET),
        "save a nesting": lambda: hf_stream.save_nested(tensors, top, max_shard_size=256, **QUIET),
    }
    for name, act in acts.items():
        place = source if name in ("open", "verify", "save a nesting") else top
        _case(campaign, f"64 descriptors: {name}", lambda act=act, place=place: limited(act, place))  # type: ignore[misc]


def little_memory(campaign: Campaign) -> None:
    """A conversion of 128 MiB with 64 MiB of new addresses beyond its buffers and threads."""
    source = campaign.folder / "large"
    source.mkdir()
    for number in range(4):
        save_file(
            {f"t{number}": torch.full((8 * MIB,), float(number))},
            source / f"model-{number + 1:05}-of-00004.safetensors",
        )

    def attempt() -> list[str]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 64 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        out = campaign.folder / "little"
        try:
            hf_stream.convert(source, out, max_shard_size="1GB", dtype=torch.bfloat16, buffer_size=4 * MIB, **QUIET)
        except (hf_stream.HfStreamError, OSError, MemoryError, RuntimeError):
            return ["something was published"] if out.exists() else []
        return []

    _case(campaign, "little memory: convert", attempt)


def small_files(campaign: Campaign) -> None:
    """No file may have more than a mebibyte."""
    tensors = {"a": torch.ones(MIB), "b": torch.ones(3)}

    def attempt(name: str, act: Callable[[Path], object]) -> list[str]:
        top = campaign.folder / f"small files {name}"
        top.mkdir()
        save_file({"x": torch.ones(3)}, top / "model.safetensors")
        before = trees.everything(top)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        try:
            act(top)
        except (hf_stream.HfStreamError, OSError) as error:
            wrong = [] if os.strerror(errno.EFBIG) in str(error) else [f"it does not say what is wrong: {error}"]
            return wrong + ([] if trees.everything(top) == before else ["something was left, or lost"])
        return ["it reports success"]

    acts: dict[str, Callable[[Path], object]] = {
        "save": lambda top: hf_stream.save_checkpoint(tensors, top, **QUIET),
        "save_nested": lambda top: hf_stream.save_nested(tensors, top / "s.safetensors", **QUIET),
        "writer": lambda top: hf_stream.CheckpointWriter(top, tensors),
    }
    for name, act in acts.items():
        _case(campaign, f"small files: {name}", lambda name=name, act=act: attempt(name, act))  # type: ignore[misc]


def no_locks(campaign: Campaign) -> None:
    """A file system without flock."""
    top = campaign.folder / "top"
    for name in campaign.few(list(filter(campaign.wanted, SCENARIOS)), FEW):
        scenario = SCENARIOS[name]
        warm(scenario, campaign.folder / "warm")
        template = prepared(scenario, campaign.folder)
        truth = find_truth(scenario, fresh(template, top))
        for code in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            fresh(template, top)
            attempt = partial(_without_locks, scenario, top, truth, code)
            _case(campaign, f"no locks ({errno.errorcode[code]}): {name}", attempt)


def _without_locks(scenario: Scenario, top: Path, truth: Truth, code: int) -> list[str]:
    with Watch(top, LOCKS, fail_all(code)):
        scenario.act(top)
    left = trees.everything(top)
    return [] if left == truth.whole else [trees.difference(left, truth.whole)]


def children(campaign: Campaign) -> None:
    """A process that is forked while a writer is open ends in one way or another: the parent goes on."""

    def raised() -> None:
        raise ZeroDivisionError

    ways: dict[str, Callable[[], object]] = {
        "sys.exit": lambda: sys.exit(0),
        "os._exit": lambda: os._exit(0),
        "an exception": raised,
        "its end": lambda: None,
    }
    for name, leave in ways.items():
        for exists in (False, True):
            place = campaign.folder / f"{name} {exists}"
            if exists:
                hf_stream.save_checkpoint({"x": torch.ones(3)}, place, **QUIET)
            label = f"a child leaves by {name}, {'over a checkpoint' if exists else 'into a new directory'}"
            _case(campaign, label, lambda place=place, leave=leave: _with_child(place, leave))  # type: ignore[misc]


def _with_child(place: Path, leave: Callable[[], object]) -> list[str]:
    tensors = {"a": torch.ones(1000), "b": torch.zeros(1000)}
    child = -1
    try:
        with hf_stream.CheckpointWriter(place, tensors) as writer:
            writer.write("a", tensors["a"])
            child = os.fork()
            if not child:
                leave()
            else:
                os.waitpid(child, 0)
                writer.write("b", tensors["b"])
    finally:
        if not child:
            os._exit(0)  # the child has left the block; the parent's work is to be as it was
    loaded = load_file(place / "model.safetensors")
    wrong = [] if all(torch.equal(loaded[name], tensors[name]) for name in tensors) else ["it is not what was written"]
    left = sorted(path.name for path in place.iterdir())
    return wrong + ([] if left == ["model.safetensors"] else [f"there is {left}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
