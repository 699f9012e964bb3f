"""What tests run in processes of their own, to kill them or to let them meet: `python children.py NAME ARGUMENTS`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import hf_stream

sys.path.insert(0, str(Path(__file__).with_name("reliability")))

from calls import NAMES, Watch, kill_at


class Stops:
    """Goes no further after some moves, and says so: for whoever wants to kill this process there."""

    def __init__(self, moves: int) -> None:
        self.left = moves

    def update(self, n: int) -> None:
        self.left -= 1
        if self.left == 0:
            sys.stdout.write("stopped\n")
            sys.stdout.flush()
        if self.left <= 0:
            sys.stdin.read()


def convert_and_stop(source: str, destination: str, max_shard_size: str, moves: str) -> None:
    hf_stream.convert(source, destination, max_shard_size=int(max_shard_size), progress=Stops(int(moves)))


def save_until_killed(template: str, top: str, value: str, max_shard_size: str) -> None:
    """Save over copies of `template`, each time in a process that is killed one change later; say how often."""
    tensors = {
        name: torch.full_like(t.materialize(), int(value)) for name, t in hf_stream.open_checkpoint(template).items()
    }
    _save_until_killed(
        template, top, lambda copy: hf_stream.save_checkpoint(tensors, copy, max_shard_size=int(max_shard_size))
    )


def save_nested_until_killed(template: str, top: str, value: str, file: str, max_shard_size: str) -> None:
    """The same for a nested state, in the file or folder that `file` names in the copies ("." for the copies)."""
    state = {f"t{n}": [torch.full((1000,), float(value)), int(value)] for n in range(6)}
    size = int(max_shard_size) or None
    _save_until_killed(template, top, lambda copy: hf_stream.save_nested(state, copy / file, max_shard_size=size))


def convert_to_partitions_until_killed(template: str, top: str, source: str) -> None:
    """The same for SwiftTransformer's partitions."""
    layout = hf_stream.layouts.swift_transformer(2, head_dim=4)
    # What the first conversion imports, each of the processes would import anew.
    hf_stream.convert(source, Path(top, "first"), layout=layout, progress=False)
    _save_until_killed(template, top, lambda copy: hf_stream.convert(source, copy, layout=layout, progress=False))


def _save_until_killed(template: str, top: str, save: Callable[[Path], object]) -> None:
    for limit in range(1000):
        copy = Path(top, str(limit))
        shutil.copytree(template, copy)
        child = os.fork()
        if not child:
            die_after(limit, Path(top))
            save(copy)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            sys.stdout.write(f"{limit}\n")
            return


def die_after(limit: int, top: Path) -> None:
    """From now on, be killed before the call after `limit` calls that change names or modes under `top`."""
    Watch(top, NAMES | {"chmod"}, kill_at(limit)).__enter__()


def save_again_and_again(directory: str, value: str, times: str, enough: str) -> None:
    """Save checkpoints full of `value`, in shards and in one file by turns; wait while somebody else saves.

    At least `times` of them, and on until the file `enough` is there.
    """
    tensors = {f"t{n}": torch.full((1000,), float(value)) for n in range(6)}
    done = 0
    while done < int(times) or not os.path.exists(enough):
        try:
            hf_stream.save_checkpoint(tensors, directory, max_shard_size=8000 if done % 2 else "1GB")
            done += 1
        except hf_stream.CheckpointError as error:
            if "another process is saving" not in str(error) and "was put there meanwhile" not in str(error):
                raise


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
