"""A LazyTensor as an object: in modules, copied, asked for its memory, written to."""

from __future__ import annotations

import copy
import doctest
import io
import operator
import pickle
import threading
import weakref
from collections.abc import Callable

import einops
import numpy as np
import pytest
import torch
from programs import bits, seeded
from torch import nn

import hf_stream.lazy.tensor
from hf_stream.errors import LazyTensorError
from hf_stream.lazy import LazyTensor

X = seeded((4, 6), torch.float32)


def lazy() -> LazyTensor:
    return LazyTensor.from_tensor(X)


class Tied(nn.Module):
    """Two layers with one weight, and a buffer, all lazy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.first.weight = nn.Parameter(LazyTensor.from_tensor(torch.randn(4, 4)))
        self.second.weight = self.first.weight
        self.register_buffer("steps", LazyTensor.from_tensor(torch.arange(3)))


def linear() -> nn.Linear:
    module = nn.Linear(6, 4)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(LazyTensor.from_tensor(parameter.data)))
    return module


def test_the_examples_of_the_docstring() -> None:
    assert doctest.testmod(hf_stream.lazy.tensor).attempted > 0
    assert doctest.testmod(hf_stream.lazy.tensor).failed == 0


def test_repr_and_format_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("hf_stream.lazy.run.execute")
    shown = "LazyTensor(shape=[4, 6], dtype=torch.float32, device='cpu')"
    assert repr(lazy()) == str(lazy()) == f"{lazy()}" == shown
    assert repr(nn.Parameter(lazy())) == shown
    assert "Linear(in_features=6, out_features=4" in repr(linear())
    assert str({"a": lazy()}) == f"{{'a': {shown}}}"
    assert len(lazy()) == 4


def test_a_leaf_honours_the_storage_offset_and_strides_of_its_tensor() -> None:
    base = torch.arange(100.0)
    for real in (base[10:34].view(4, 6), base[7:].as_strided((4, 6), (2, 9)), base[50], base[:0], base.expand(3, 100)):
        leaf = LazyTensor.from_tensor(real)
        assert (leaf.stride(), leaf.storage_offset()) == (real.stride(), real.storage_offset())
        assert torch.equal(leaf.materialize(), real)
    # Inside its storage, a view may be left again, as in eager torch.
    assert torch.equal(LazyTensor.from_tensor(base[10:20]).as_strided((3,), (1,), 0).materialize(), base[:3])


def test_a_leaf_shows_later_changes_of_its_tensor() -> None:
    real = torch.zeros(3)
    leaf = LazyTensor.from_tensor(real)
    joined = torch.cat([leaf, leaf + 1])
    real += 5
    assert joined.materialize().tolist() == [5, 5, 5, 6, 6, 6]


@pytest.mark.parametrize("real", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_tensors_without_plain_memory_are_no_leaves(real: torch.Tensor) -> None:
    with pytest.raises(LazyTensorError, match="give a dense tensor with data"):
        LazyTensor.from_tensor(real)


def test_a_parameter_of_a_lazy_is_that_lazy_with_a_mark() -> None:
    parameter = nn.Parameter(lazy())
    assert type(parameter) is LazyTensor
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    # Outside no_grad, ops on it are recorded by autograd as well; their results are values all the same.
    assert torch.equal((parameter * 2).materialize(), X * 2)
    assert isinstance(linear().weight, nn.Parameter)


def test_copies_share_the_expression_and_keep_attributes() -> None:
    parameter = nn.Parameter(lazy())
    parameter.note = [1]
    shallow, deep = copy.copy(parameter), copy.deepcopy(parameter)
    assert shallow.note is parameter.note
    assert deep.note == [1]
    assert deep.note is not parameter.note
    for twin in (shallow, deep):
        assert twin is not parameter
        assert isinstance(twin, nn.Parameter)
        assert twin.requires_grad
        assert torch.equal(twin.materialize(), X)
    assert not copy.deepcopy(LazyTensor.from_tensor(torch.arange(3))).requires_grad


def test_deepcopy_of_a_module_keeps_tied_weights_tied_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("hf_stream.lazy.run.execute")
    module = Tied()
    twin = copy.deepcopy(module)
    assert twin.first.weight is twin.second.weight
    assert twin.first.weight is not module.first.weight
    assert len(list(twin.parameters())) == 1
    assert isinstance(twin.steps, LazyTensor)


@pytest.mark.parametrize("assign", [True, False])
def test_load_state_dict(assign: bool) -> None:
    module, source = nn.Linear(6, 4).half(), nn.Linear(6, 4)
    module.load_state_dict({k: LazyTensor.from_tensor(v) for k, v in source.state_dict().items()}, assign=assign)
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, LazyTensor) == assign
        wanted = source.get_parameter(name).detach()
        got = LazyTensor.from_tensor(parameter).materialize()
        assert torch.equal(got, wanted if assign else wanted.half())


def test_load_state_dict_of_the_modules_own_state_changes_nothing() -> None:
    module = nn.Linear(6, 4)
    before = module.weight.clone()
    module.load_state_dict({k: LazyTensor.from_tensor(v) for k, v in module.state_dict().items()})
    assert torch.equal(module.weight, before)


def test_load_state_dict_into_a_meta_module_is_torchs_no_op() -> None:
    with torch.device("meta"):
        module = nn.Linear(6, 4)
    with pytest.warns(UserWarning, match="no-op"):
        module.load_state_dict({"weight": lazy(), "bias": lazy()[:, 0]})
    assert module.weight.is_meta


def test_module_casts_stay_lazy_and_keep_the_parameter_object() -> None:
    module = Tied()
    weight, wanted = module.first.weight, module.first.weight.materialize().half()
    module.half()
    assert module.first.weight is module.second.weight is weight
    assert weight.dtype == torch.float16
    assert torch.equal(weight.materialize(), wanted)
    assert Tied().to(torch.float64).first.weight.dtype == torch.float64


def test_to_meta_and_to_empty_give_real_parameters() -> None:
    for module in (linear().to("meta"), linear().to_empty(device="cpu"), linear().to("meta").to_empty(device="cpu")):
        assert type(module.weight) is nn.Parameter
        assert module.weight.shape == (4, 6)
    module = Tied().to_empty(device="cpu")
    assert module.first.weight is module.second.weight


def test_data_can_be_taken_and_assigned() -> None:
    parameter = nn.Parameter(lazy())
    assert not parameter.data.requires_grad
    other = seeded((2, 3), torch.float16)
    parameter.data = LazyTensor.from_tensor(other)
    assert isinstance(parameter, LazyTensor)
    assert torch.equal(parameter.materialize(), other)
    parameter.note = "kept"
    parameter.data = X
    assert type(parameter) is nn.Parameter
    assert parameter.requires_grad
    assert parameter.note == "kept"
    assert parameter.data_ptr() == X.data_ptr()


def test_tensors_can_be_swapped() -> None:
    one, other = nn.Parameter(lazy()), nn.Parameter(torch.zeros(2, 2))
    torch.utils.swap_tensors(one, other)
    assert type(one) is nn.Parameter
    assert one.shape == (2, 2)
    assert torch.equal(other.materialize(), X)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.data_ptr(),
        lambda x: x.untyped_storage(),
        lambda x: x.storage(),
        lambda x: x.share_memory_(),
        lambda x: x.is_shared(),
        lambda x: x.numpy(),
        np.asarray,
        np.array,
        np.from_dlpack,
        torch.from_dlpack,
        pickle.dumps,
        lambda x: torch.save({"x": x}, io.BytesIO()),
        lambda x: linear().share_memory(),
        lambda x: x.materialize(x),
    ],
)
def test_memory_is_not_given_away(ask: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(LazyTensorError, match=r"call \.materialize\(\) first"):
        ask(lazy())


def test_c_code_that_takes_the_address_fails() -> None:
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(lazy())
    with pytest.raises(RuntimeError):
        torch.tensor([lazy()[0, 0], lazy()[0, 1]])


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: operator.iadd(x, 1),
        lambda x: operator.setitem(x, 0, 1),
        lambda x: operator.setitem(x, slice(1, 2), X[0]),
        lambda x: x.copy_(X),
        lambda x: x.zero_(),
        lambda x: x.resize_(3),
        lambda x: x.set_(X),
        lambda x: x.t_(),
        lambda x: x.squeeze_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.as_strided_((2,), (1,)),
        lambda x: x.uniform_(),
        lambda x: x.index_copy_(0, torch.tensor([0]), X[:1]),
        lambda x: x.masked_fill_(x > 0, 1),
        lambda x: nn.init.normal_(x),
        lambda x: torch.add(X, 1, out=x),
        lambda x: torch._foreach_add_([x], 1),
        lambda x: torch._foreach_copy_([x], [X]),
    ],
)
def test_nothing_writes_into_a_lazy(write: Callable[[torch.Tensor], object]) -> None:
    before = X.clone()
    with pytest.raises(LazyTensorError, match="would write into a LazyTensor"):
        write(lazy())
    assert torch.equal(X, before)


def test_real_tensors_can_be_written_from_lazies() -> None:
    real = X.clone()
    real[0] = LazyTensor.from_tensor(torch.ones(6))
    real[1:3].copy_(LazyTensor.from_tensor(torch.zeros(6)))
    assert real[:3].tolist() == [[1.0] * 6, [0.0] * 6, [0.0] * 6]
    assert real.add_(lazy()) is real
    torch.add(lazy(), 1, out=real)
    assert torch.equal(real, X + 1)
    targets = [torch.zeros(4, 6), torch.zeros(3, 4, 6, dtype=torch.bfloat16)]
    torch._foreach_copy_(targets, [lazy(), lazy()])
    assert torch.equal(targets[0], X)
    assert torch.equal(targets[1], X.bfloat16().expand(3, 4, 6))
    conjugate = torch.zeros(3, dtype=torch.complex64).conj()
    conjugate.copy_(LazyTensor.from_tensor(torch.full((3,), 1 + 2j)))
    assert torch.equal(conjugate, torch.full((3,), 1 + 2j))


def test_custom_ops_get_real_tensors() -> None:
    with torch.library._scoped_library("hf_stream_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.define("bump(Tensor(a!) x) -> ()")
        library.impl("bump", lambda x: None, "CompositeExplicitAutograd")
        result = torch.ops.hf_stream_tests.twice(lazy())
        assert type(result) is torch.Tensor
        assert torch.equal(result, X * 2)
        with pytest.raises(LazyTensorError, match="would write"):
            torch.ops.hf_stream_tests.bump(lazy())


@pytest.mark.parametrize("pattern", ["(a b) c -> b (c a)", "(a b) c -> c b a", "a (b c) -> (c a) b"])
def test_einops(pattern: str) -> None:
    size = {"b": 2}
    assert bits(einops.rearrange(lazy(), pattern, **size).materialize()) == bits(einops.rearrange(X, pattern, **size))
    got, wanted = (einops.reduce(x, "(a b) c -> b c", "mean", **size) for x in (lazy(), X))
    assert bits(got.materialize()) == bits(wanted)
    assert bits(einops.repeat(lazy(), "a b -> a r b", r=3).materialize()) == bits(einops.repeat(X, "a b -> a r b", r=3))


def test_identity_hashes_and_weak_references() -> None:
    one, other = lazy(), lazy()
    assert len({one, other, one}) == 2
    assert (one == other).materialize().all()
    assert (one == None) is False  # noqa: E711
    reference = weakref.ref(one)
    assert reference() is one
    del one
    assert reference() is None


def test_threads_build_and_run_expressions() -> None:
    base = torch.arange(1000.0).reshape(10, 100)
    failures: list[int] = []

    def program(x: torch.Tensor, i: int) -> torch.Tensor:
        total = x[:, :6].t()
        for j in range(10):
            total = total + torch.cat([x[:, i : i + 3], x[:, i + 1 : i + 4]], 1).t() * j
        return total

    def work(i: int) -> None:
        if not torch.equal(program(LazyTensor.from_tensor(base), i).materialize(), program(base, i)):
            failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_collectives_do_not_write_into_lazies(tmp_path) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for write in (lambda: dist.all_reduce(lazy()), lambda: dist.broadcast(lazy(), 0)):
            with pytest.raises(LazyTensorError, match="would write into a LazyTensor"):
                write()
        reduced = dist._functional_collectives.all_reduce(lazy(), "sum", dist.group.WORLD)
        assert torch.equal(reduced.wait() if hasattr(reduced, "wait") else reduced, X)
    finally:
        dist.destroy_process_group()
