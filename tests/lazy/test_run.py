"""Materialising: identities, parameters, devices, aliases, memory."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from memory_peaks import in_fresh_process
from programs import bits, seeded
from torch import nn
from tqdm import tqdm

from hf_stream.copying.region import Region
from hf_stream.errors import CopyError, LazyTensorError
from hf_stream.lazy import LazyTensor, materialize, write_into
from hf_stream.storage import FileStorage

X = seeded((4, 6), torch.float32)


def on_file(tensor: torch.Tensor, path: Path, start: int = 0) -> LazyTensor:
    path.write_bytes(b"\xaa" * start + bits(tensor))
    return LazyTensor.from_storage(FileStorage(path), tensor.dtype, tensor.shape, start)


def test_one_lazy_given_twice_becomes_one_tensor() -> None:
    lazy, other = LazyTensor.from_tensor(X), LazyTensor.from_tensor(X)
    updates: list[int] = []
    bar = SimpleNamespace(update=updates.append)
    first, second, third = materialize([lazy, lazy, other], progress=bar)
    assert sum(updates) == 2 * X.nbytes
    assert first is second
    assert third is not first
    assert third.data_ptr() != first.data_ptr() != X.data_ptr()
    named = materialize({"a": lazy, "b": other, "c": lazy})
    assert list(named) == ["a", "b", "c"]
    assert named["a"] is named["c"]


def test_parameters_stay_parameters_and_keep_their_attributes() -> None:
    parameter = nn.Parameter(LazyTensor.from_tensor(X), requires_grad=False)
    parameter._is_hf_initialized = True
    plain = LazyTensor.from_tensor(X)
    plain.note = "kept"
    real, unmarked = materialize([parameter, plain])
    assert type(real) is nn.Parameter
    assert not real.requires_grad
    assert real._is_hf_initialized
    assert "_is_param" not in vars(real)
    assert type(unmarked) is torch.Tensor
    assert unmarked.note == "kept"
    assert materialize([nn.Parameter(LazyTensor.from_tensor(X))])[0].requires_grad


def test_real_tensors_pass_and_move() -> None:
    assert materialize([X])[0] is X
    assert materialize([X], device="meta")[0].is_meta
    assert materialize([LazyTensor.from_tensor(X)], device="meta")[0].is_meta
    assert materialize([]) == []
    assert materialize({}) == {}


def test_out_is_filled_cast_and_given_back() -> None:
    out = torch.zeros(6, 4, dtype=torch.float64).t()
    lazy = LazyTensor.from_tensor(X)
    assert lazy.materialize(out) is out
    assert torch.equal(out, X.double())
    with pytest.raises(LazyTensorError, match=r"shape \[4, 6\] into a tensor of shape \[3\]"):
        lazy.materialize(torch.zeros(3))


def test_write_into_casts_names_and_counts(tmp_path: Path) -> None:
    lazy = on_file(X, tmp_path / "x")
    out = torch.zeros(4, 6, dtype=torch.bfloat16)
    both = torch.zeros(2, 4, 6)
    updates: list[int] = []
    jobs = [(lazy, Region.of(out), "a"), (X, Region.of(both[0]), "b"), (lazy + 1, Region.of(both[1]), "c")]
    write_into(jobs, progress=SimpleNamespace(update=updates.append))
    assert torch.equal(out, X.bfloat16())
    assert torch.equal(both, torch.stack([X, X + 1]))
    assert sum(updates) == X.numel() * (2 + 4 + 4)
    with pytest.raises(LazyTensorError, match="'w': cannot fill"):
        write_into([(lazy, Region.of(torch.empty(3)), "w")])
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(CopyError, match=r"'w': .*x"):
        write_into([(lazy, Region.of(torch.empty(4, 6)), "w")])


def test_alias_gives_a_private_mapping_where_the_file_has_the_tensor_as_it_is(tmp_path: Path) -> None:
    lazy = on_file(X, tmp_path / "x", 64)
    unaligned = on_file(X, tmp_path / "y", 3)
    rows, whole, square, columns, cast, odd = materialize(
        [lazy[1:3], lazy, lazy.view(2, 12), lazy[:, 1:], lazy.double(), unaligned], alias=True
    )
    for got, wanted in zip(
        (rows, square, columns, cast, odd), (X[1:3], X.view(2, 12), X[:, 1:], X.double(), X), strict=True
    ):
        assert bits(got) == bits(wanted)
    whole.zero_()
    assert bits(lazy.materialize()) == bits(X)
    # The mapping shows later writes to the file; copies do not.
    with (tmp_path / "x").open("r+b") as stream:
        stream.write(bytes(64 + 24 * 4))
    assert rows.count_nonzero() == 0
    assert columns.count_nonzero() > 0


MEMORY = """
import json, sys, torch
from memory_peaks import peak_of
from hf_stream.lazy import LazyTensor, materialize
from hf_stream.copying.region import Region
from hf_stream.lazy import write_into
from hf_stream.storage import FileStorage

path, case = sys.argv[1:]
file = FileStorage(path)
lazies = [LazyTensor.from_storage(file, torch.bfloat16, (2048, 1024), i << 22) for i in range(16)]
if case == "movement":
    pairs = [torch.cat([a.t(), b.t()], 1) for a, b in zip(lazies[::2], lazies[1::2])]
    lazy = torch.stack(pairs).transpose(1, 2).float()
else:
    lazy = torch.stack([a.float() * 2 for a in lazies])
out = torch.zeros(lazy.shape)
materialize([lazies[0][:10] + 1, torch.cat(lazies[:2])[:5].float()])  # imports, and threads' stacks
extra = peak_of(lambda: write_into([(lazy, Region.of(out), "out")], buffer_size=8 << 20))
print(json.dumps({"extra": extra, "nbytes": out.nbytes}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize(
    ("case", "operation"),
    # One operation holds 8 MiB of inputs and 8 MiB of outputs.
    [("movement", 0), ("computation", 16 << 20)],
)
def test_memory_beyond_the_destination_is_the_buffer_and_one_operation(
    tmp_path: Path, case: str, operation: int
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (16 << 14))
    # Blocks go back to the system when freed, so that what is held is measured and not what glibc keeps for reuse.
    measured = json.loads(in_fresh_process(MEMORY, path, case, MALLOC_MMAP_THRESHOLD_="65536"))
    assert measured["nbytes"] == 128 << 20
    # 4 MiB for Python objects and the planning.
    assert measured["extra"] <= (8 << 20) + operation + (4 << 20)


def test_a_bar_of_unknown_length_counts() -> None:
    with tqdm(file=io.StringIO()) as bar:
        materialize([LazyTensor.from_tensor(X)], progress=bar)
        assert bar.n == X.nbytes


def test_a_default_device_is_no_place_for_bytes(tmp_path: Path) -> None:
    lazy = on_file(X, tmp_path / "x")
    with torch.device("meta"):
        results = [*materialize([lazy], alias=True), *materialize([lazy.t() * 2]), lazy.t().materialize()]
    for result, expected in zip(results, (X, X.t() * 2, X.t()), strict=True):
        assert torch.equal(result, expected)


def test_conjugate_and_negative_views_are_filled_with_what_they_show() -> None:
    source = torch.tensor([1 + 2j, 3 - 4j])
    base = torch.zeros_like(source)
    assert torch.equal(LazyTensor.from_tensor(source).materialize(out=base.conj()), source.conj().conj())
    assert torch.equal(base, source.conj().resolve_conj())
    assert LazyTensor.from_tensor(torch.tensor([5.0, 6.0])).materialize(out=base.conj().imag).tolist() == [5, 6]
    assert base.imag.tolist() == [-5, -6]


def test_moved_memory_is_read_where_it_is(tmp_path: Path) -> None:
    tensor = torch.arange(100_000)
    lazy = LazyTensor.from_tensor(tensor)
    tensor.share_memory_()
    tensor += 1
    with FileStorage.create(tmp_path / "out", tensor.nbytes) as file:
        write_into([(lazy, Region.contiguous(file, tensor.dtype, tensor.shape), "x")])
    assert (tmp_path / "out").read_bytes() == bits(tensor)
    tensor.untyped_storage().resize_(0)
    for expression in (lazy, lazy * 2):
        with pytest.raises((CopyError, ValueError), match="outside"):
            expression.materialize()
