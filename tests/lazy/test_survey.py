"""What lazies would read and hold, and their fingerprint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import bits, seeded

from hf_stream.lazy import LazyTensor, fingerprint, reads, working_set
from hf_stream.storage import FileStorage

X = seeded((8, 6), torch.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bits(X) * 2)
    return path


def on_file(path: Path, offset: int = 0) -> LazyTensor:
    return LazyTensor.from_storage(FileStorage(path), torch.float32, (8, 6), offset)


def nbytes_read(*tensors: torch.Tensor) -> int:
    return sum(region.nbytes for region in reads(tensors))


def test_reads_counts_what_is_needed_and_inputs_of_operations_once(file: Path) -> None:
    x = on_file(file)
    assert nbytes_read(x) == 192
    assert nbytes_read(x[2:4], x.t()[1]) == 48 + 32
    assert nbytes_read(torch.cat([x, X])) == 384
    shared = x + 1
    assert nbytes_read(shared[0], shared[1], shared * 2) == 192
    assert nbytes_read(x[:2].exp().log()) == 48
    assert nbytes_read(X) == 192
    assert {region.storage.name for region in reads([x])} == {str(file)}


def test_movement_holds_nothing(file: Path) -> None:
    x = on_file(file)
    assert working_set([x, torch.cat([x, x])[1:].t().double(), torch.stack([x, X])]) == 0


def test_the_working_set_is_that_of_the_largest_operation(file: Path) -> None:
    x = on_file(file)
    assert working_set([x + 1]) == 192 + 192
    assert working_set([x[:4] + 1, x + 1, x[:2] + 1]) == 192 + 192
    assert working_set([x.sum()]) == 192 + 4
    # A real tensor, and an output that is at hand, take no room of their own.
    assert working_set([x + torch.ones(6)]) == 192 + 192
    assert working_set([LazyTensor.from_tensor(X) + 1]) == 192
    assert working_set([(x + 1).exp()]) == 192 + 192
    # An output that is joined with others is copied into the operation's input.
    assert working_set([torch.cat([x + 1, x]).exp()]) == 192 + 192 + 384


def test_the_working_set_of_a_long_chain_is_that_of_a_link(file: Path) -> None:
    lazy: torch.Tensor = on_file(file)
    for _ in range(1500):
        lazy = (lazy + 1) * 2
    assert working_set([lazy]) == 192 + 192
    assert len(fingerprint([torch.cat([lazy, lazy])])) == 64


def expression(x: torch.Tensor) -> list[torch.Tensor]:
    joined = torch.cat([x[2:], x.t().reshape(8, 6)]).half()
    return [joined[1:], joined * 2, torch.where(x > 0, x, 0.0), *x.sort(0)]


def test_equal_expressions_over_an_unchanged_file_have_one_fingerprint(file: Path) -> None:
    assert fingerprint(expression(on_file(file))) == fingerprint(expression(on_file(file)))
    assert fingerprint(expression(LazyTensor.from_tensor(X))) == fingerprint(
        expression(LazyTensor.from_tensor(X.clone()))
    )
    assert fingerprint([]) == fingerprint([])


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda x: [],
    "twice": lambda x: [x, x],
    "row": lambda x: x[:1],
    "other row": lambda x: x[1:2],
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(6, 8),
    "bits": lambda x: x.view(torch.int32),
    "cast": lambda x: x.half(),
    "cast back": lambda x: x.half().float(),
    "join": lambda x: torch.cat([x, x]),
    "join of parts": lambda x: torch.cat([x[:4], x[4:], x]),
    "join of parts in order": lambda x: torch.cat([x[4:], x[:4], x]),
    "join elsewhere": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "op": lambda x: x.exp(),
    "other op": lambda x: x.log(),
    "argument": lambda x: x + 1,
    "other argument": lambda x: x + 2,
    "float argument": lambda x: x + 1.0,
    "keyword": lambda x: torch.add(x, x, alpha=2),
    "other keyword": lambda x: torch.add(x, x, alpha=3),
    "real argument": lambda x: x + torch.ones(6),
    "other real argument": lambda x: x + torch.zeros(6),
    "swapped arguments": lambda x: x / x[0],
    "arguments": lambda x: x[0] / x,
    "first output": lambda x: x.aminmax(dim=0)[0],
    "second output": lambda x: x.aminmax(dim=0)[1],
    "device": lambda x: torch.ops.aten._to_copy(x, device=torch.device("cuda", 0)),
    "offset": lambda x: LazyTensor.from_storage(x._source.storage, torch.float32, (8, 6), 192),  # type: ignore[attr-defined]
}


def test_any_change_of_an_expression_changes_its_fingerprint(file: Path) -> None:
    x = on_file(file)
    prints = {name: fingerprint(r if isinstance(r := change(x), list) else [r]) for name, change in CHANGES.items()}
    prints["same"] = fingerprint([x])
    assert len(set(prints.values())) == len(prints)


@pytest.mark.parametrize("change", ["time", "size", "replaced", "content of memory"])
def test_any_change_below_an_expression_changes_its_fingerprint(file: Path, change: str) -> None:
    real = X.clone()
    before = fingerprint([on_file(file) + real])
    assert fingerprint([on_file(file) + real]) == before
    if change == "time":
        os.utime(file, ns=(1, 1))
    elif change == "size":
        with file.open("ab") as stream:
            stream.write(b"more")
        os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    elif change == "replaced":
        other = file.with_name("other")
        other.write_bytes(file.read_bytes())
        os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        other.replace(file)
    else:
        real[3, 3] += 1
    assert fingerprint([on_file(file) + real]) != before
