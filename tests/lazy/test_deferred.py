"""Deferred operations: each runs once, in order, on inputs as eager PyTorch would have them, and is freed."""

from __future__ import annotations

import math
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import bits, seeded
from torch.utils._python_dispatch import TorchDispatchMode

from hf_stream.errors import LazyTensorError
from hf_stream.lazy import LazyTensor, materialize
from hf_stream.lazy.deferred import roomy_strides, steps
from hf_stream.storage import FileStorage

X = seeded((513, 1027), torch.float32)


class Calls(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def on_file(tensor: torch.Tensor, path) -> LazyTensor:
    path.write_bytes(bits(tensor))
    return LazyTensor.from_storage(FileStorage(path), tensor.dtype, tensor.shape, 0)


def count(tensors: list[torch.Tensor]) -> tuple[Counter[str], list[torch.Tensor]]:
    with Calls() as calls:
        results = materialize(tensors)
    return calls.counts, results


def test_nothing_runs_before_it_is_needed() -> None:
    with Calls() as calls:
        x = LazyTensor.from_tensor(torch.ones(3))
        calls.counts.clear()
        used, unused = x.exp(), x.log()
        del unused
    counts, _ = count([used])
    assert (counts["exp"], counts["log"]) == (1, 0)


def test_an_operation_shared_by_several_results_runs_once() -> None:
    shared = LazyTensor.from_tensor(torch.ones(4, 3)).exp()
    values, indices = shared.sort(0)
    counts, results = count([shared, shared[1:], shared.log(), torch.cat([shared, shared]), values, indices, values])
    assert (counts["exp"], counts["sort"], counts["log"]) == (1, 1, 1)
    assert torch.equal(results[3], torch.ones(8, 3).exp())
    assert results[4] is results[6]


def test_an_operation_runs_once_however_its_uses_branch() -> None:
    real, lazy = torch.ones(2), LazyTensor.from_tensor(torch.ones(2))
    for _ in range(60):
        real, lazy = (real + 1) * 0.5 + real.neg(), (lazy + 1) * 0.5 + lazy.neg()
    counts, (result,) = count([lazy])
    assert torch.equal(result, real)
    assert counts["neg"] == 60


def test_a_long_chain_needs_no_deep_stack() -> None:
    lazy = LazyTensor.from_tensor(torch.zeros(2))
    joined = lazy
    for _ in range(2000):
        lazy = lazy + 1
        joined = torch.cat([joined, lazy[:1]])[1:]
    assert lazy.materialize().tolist() == [2000, 2000]
    assert joined.materialize().tolist() == [1999, 2000]


def test_outputs_are_freed_after_their_last_use() -> None:
    x = LazyTensor.from_tensor(torch.ones(3))
    doubled = x * 2
    wanted = [torch.stack([doubled.exp(), doubled.log()]), (x + 1).sqrt()]
    computes = [part.source.compute for part in wanted[0]._source.parts] + [wanted[1]._source.compute]
    held, most = set(), 0
    for kind, compute, dep in steps(computes):
        if kind == "run":
            held.add(compute)
        elif kind == "free":
            held.remove(compute)
        elif kind == "take":
            assert dep in held
        most = max(most, len(held))
    assert not held
    assert most == 2


def test_only_the_result_outlives_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    real_empty = torch.empty_strided

    def empty_strided(*args, **kwargs):
        tensor = real_empty(*args, **kwargs)
        alive.append(weakref.ref(tensor))
        return tensor

    lazy = torch.cat([LazyTensor.from_tensor(torch.ones(3))] * 2).exp() + 1
    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    lazy.materialize()
    assert alive
    assert all(reference() is None for reference in alive)


@pytest.mark.parametrize(
    "window",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[:, :700],
        lambda x: x[::2, ::3],
        lambda x: x[5:].t()[:, 1:],
        lambda x: x[0].expand(40, -1),
        lambda x: x.unfold(0, 4, 2),
        lambda x: x[:, :, None].expand(-1, -1, 3).permute(2, 0, 1),
    ],
    ids=["whole", "transposed", "columns", "steps", "transposed columns", "repeated", "overlapping", "repeated inside"],
)
@pytest.mark.parametrize("place", ["memory", "file", "joined", "computed", "computed transposed"])
def test_sums_add_up_in_the_order_of_eager_torch(window, place: str, tmp_path) -> None:
    def prepare(x: torch.Tensor) -> torch.Tensor:
        if place == "joined":
            return torch.cat([x[:100], x[100:]])
        if place == "computed":
            return x * 3
        return (x.t() * 3).t() if place == "computed transposed" else x

    lazy = on_file(X, tmp_path / "x") if place == "file" else LazyTensor.from_tensor(X)
    for op in (torch.sum, lambda x: x.sum(0), lambda x: x.mean(-1), torch.norm, lambda x: x.sum(0).sum()):
        assert bits(op(window(prepare(lazy))).materialize()) == bits(op(window(prepare(X))))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_roomy_strides_keep_order_gaps_and_repeats_in_little_memory(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(0, 9), max_size=4))
    stride, step = [], data.draw(st.integers(1, 3))
    for n in size:
        stride.append(step if data.draw(st.integers(0, 4)) else 0)
        step *= max(n, 1) * data.draw(st.sampled_from([1, 1, 2, 50]))
    order = data.draw(st.permutations(range(len(size))))
    window = torch.empty_strided(size, stride, device="meta").permute(order)
    roomy = roomy_strides(tuple(window.shape), window.stride())
    assert roomy is not None
    buffer = torch.empty_strided(window.shape, roomy, device="meta")
    assert buffer.is_contiguous() == window.is_contiguous()
    moving = [dim for dim in range(window.dim()) if window.shape[dim] > 1]
    assert [roomy[d] == 0 for d in moving] == [window.stride(d) == 0 for d in moving] or not window.numel()
    if window.numel():
        moving = [dim for dim in moving if roomy[dim]]
        assert sorted(moving, key=lambda d: roomy[d]) == sorted(moving, key=lambda d: window.stride(d))
        once = math.prod(window.shape[dim] for dim in moving)
        assert buffer.untyped_storage().nbytes() // 4 <= once * 2 * 1.2 ** len(moving)
        for dim in moving:  # elements of the buffer that are filled lie apart
            assert roomy[dim] <= window.stride(dim)
        places = torch.arange(buffer.untyped_storage().nbytes() // 4).as_strided(
            [n if s else 1 for n, s in zip(window.shape, roomy, strict=True)], roomy
        )
        assert places.unique().numel() == places.numel()


def test_windows_whose_dims_overlap_have_no_roomy_strides() -> None:
    assert roomy_strides((3, 4), (1, 1)) is None
    assert roomy_strides((3, 4), (3, 1)) is None
    assert roomy_strides((0, 4), (1, 1)) == (4, 1)


def test_a_real_argument_is_used_where_it_is() -> None:
    real = torch.ones(3)
    lazy = LazyTensor.from_tensor(torch.ones(3)) + real
    real.zero_()
    assert lazy.materialize().tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_an_operation_that_belies_its_meta_version_is_an_error() -> None:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("erfinv", lambda x: torch.zeros(7), "CPU", with_keyset=False, allow_override=True)
        lazy = LazyTensor.from_tensor(torch.ones(3)).erfinv()
        with pytest.raises(LazyTensorError, match=r"of shape \[7\], but .* of shape \[3\] on meta tensors"):
            lazy.materialize()


def test_requires_grad_does_not_build_graphs_while_materializing() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    result = (LazyTensor.from_tensor(torch.ones(3)) * parameter).materialize()
    assert not result.requires_grad


def test_errors_of_inner_reads_reach_the_caller(tmp_path) -> None:
    lazy = on_file(torch.ones(100), tmp_path / "cut")
    (tmp_path / "cut").write_bytes(b"")
    for broken in (lazy, lazy + 1, torch.cat([lazy, lazy]).exp()):
        with pytest.raises(OSError, match="cut"):
            broken.materialize()


def test_promotion_follows_the_default_dtype_of_the_moment_an_op_was_recorded() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        lazy, real = LazyTensor.from_tensor(torch.arange(3)) / 2, torch.arange(3) / 2
    finally:
        torch.set_default_dtype(torch.float32)
    assert lazy.materialize().dtype == real.dtype == torch.float64
    assert torch.equal(lazy.materialize(), real)
    assert torch.get_default_dtype() == torch.float32
