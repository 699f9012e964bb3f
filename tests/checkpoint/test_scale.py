"""A checkpoint of as many tensors as the largest models have: the work must grow in step with their number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hf_stream
from hf_stream.checkpoint.files import CheckpointFiles


class _Spec:
    shape = (2, 2)
    dtype = torch.bfloat16


def _made_up(directory: Path, count: int) -> Path:
    """Headers, and the few bytes of data they promise."""
    specs = {f"model.layers.{n // 1000}.mlp.experts.{n % 1000}.weight": _Spec() for n in range(count)}
    files = CheckpointFiles.plan(specs, max_shard_size=count)
    directory.mkdir()
    for shard in files.shards:
        (directory / shard.name).write_bytes(shard.prefix + bytes(shard.header.nbytes - len(shard.prefix)))
    for name, content in files.small.items():
        (directory / name).write_bytes(content)
    return directory


def _calls(function: Callable[[], object]) -> int:
    """How many Python and C functions were called: the work done, whatever else the machine does."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("work", ["open", "plan", "fingerprint", "specs"])
def test_the_work_grows_with_the_number_of_tensors_and_no_faster(tmp_path: Path, work: str) -> None:
    counts = []
    for number in (200, 400, 2000):  # the first run imports what is imported late
        source = _made_up(tmp_path / str(number), number)
        checkpoint = hf_stream.open_checkpoint(source)
        plan = hf_stream.plan_conversion(checkpoint, max_shard_size="1MB")
        does = {
            "open": lambda source=source: hf_stream.open_checkpoint(source),
            "plan": lambda checkpoint=checkpoint: hf_stream.plan_conversion(checkpoint, max_shard_size="1MB"),
            "fingerprint": plan.fingerprint,
            "specs": lambda number=number: CheckpointFiles.plan({str(n): _Spec() for n in range(number)}),
        }
        counts.append(_calls(does[work]))
    assert counts[2] / counts[1] < 5.5


def test_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    checkpoint = hf_stream.open_checkpoint(_made_up(tmp_path / "a", 100_000))
    plan = hf_stream.plan_conversion(checkpoint, max_shard_size=400_000)
    assert list(plan.tensors) == list(checkpoint)
    assert len(plan.tensors) == 100_000
    assert len(plan.files.shards) == 2
    assert plan.files.nbytes > 100_000 * 8
