"""Op by op: what a LazyTensor gives is what eager PyTorch gives, in shape, dtype, strides and every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from programs import bits, seeded

from hf_stream.errors import LazyTensorError
from hf_stream.lazy import LazyTensor, materialize, reads
from hf_stream.storage import FileStorage

Op = Callable[[torch.Tensor], object]

X = seeded((4, 6, 5), torch.float32)
C = seeded((3, 4), torch.complex64)

# The operands of every op: row-major, permuted, inside a bigger storage, joined, computed, computed in another order.
OPERANDS: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
    "contiguous": (X, lambda x: x),
    "permuted": (seeded((5, 6, 4), torch.float32).permute(2, 1, 0), lambda x: x),
    "offset": (seeded((6, 6, 5), torch.float32)[2:], lambda x: x),
    "joined": (X, lambda x: torch.cat([x[:2], x[2:]])),
    "computed": (X, lambda x: x + 1),
    "computed in another order": (seeded((5, 6, 4), torch.float32), lambda x: x.permute(2, 1, 0) * 2),
}

VIEWS: dict[str, Op] = {
    "view": lambda x: x.view(x.shape),
    "view.dtype": lambda x: x.view(torch.int32),
    "view.dtype narrower": lambda x: x.contiguous().view(torch.uint8),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "unfold overlapping": lambda x: x.unfold(2, 4, 1),
    "diagonal": lambda x: x.diagonal(1, 0, 1),
    "as_strided": lambda x: x.as_strided((3, 2), (4, 1), x.storage_offset() + 3),
    "as_strided of a slice": lambda x: x[1:].as_strided((3, 2), (4, 1)),
    "squeeze": lambda x: (x[:1].squeeze(), x[:1].squeeze(0), x[:1, :1].squeeze((0, 1))),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "movedim": lambda x: (x.movedim(0, 2), torch.moveaxis(x, [0, 1], [2, 0])),
    "swapaxes": lambda x: (x.swapaxes(0, 1), x.swapdims(0, 2), x.transpose(1, 2)),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "flatten": lambda x: (x.flatten(1), x.ravel(), x.mT.ravel()),
    "expand": lambda x: (x.unsqueeze(0).expand(3, -1, -1, -1), x[:1].expand_as(x)),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 4, 6, 5)),
    "tensor_split": lambda x: (*x.tensor_split(3, 1), *x.tensor_split([1, 4], 1)),
    "split": lambda x: (*x.split(2, 1), *x.split([1, 2, 3], 1), *x.chunk(4, 1), *x.unbind(2)),
    "hsplit": lambda x: (*x.hsplit(2), *x.vsplit(2), *x.dsplit(5)),
    "unsafe_split": lambda x: (*torch.unsafe_split(x, 2, 1), *torch.unsafe_split_with_sizes(x, [2, 4], 1)),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2, 1),
    "mT": lambda x: (x.mT, x.mH, x.adjoint(), x[0].T, x[0].H, x[0].t()),
    "indexing": lambda x: (x[1, -1], x[-3:-1, ::2], x[..., 1:], x[None, :, None], x[1:1]),
    "select": lambda x: (x.select(2, 3), x.narrow(1, 2, 3)),
    "iteration": lambda x: list(x),
    "detach": lambda x: (x.detach(), torch.ops.aten.alias(x)),
    "squeeze_copy": lambda x: (torch.squeeze_copy(x[:1]), torch.permute_copy(x, (2, 0, 1)), torch.t_copy(x[0])),
    "split_copy": lambda x: (*torch.split_copy(x, 2, 1), *torch.unbind_copy(x, 1)),
    "view_copy": lambda x: (torch.view_copy(x.contiguous(), (24, 5)), torch.expand_copy(x[:1], (3, 6, 5))),
    "slice_copy": lambda x: (torch.slice_copy(x, 1, 1, 5, 2), torch.select_copy(x, 1, 2), torch.diagonal_copy(x)),
}

MOVES: dict[str, Op] = {
    "clone": lambda x: (x.clone(), x[:, ::2].clone(), x[:1].expand(3, 6, 5).clone()),
    "contiguous": lambda x: (x.contiguous(), x.permute(2, 0, 1).contiguous()),
    "memory formats": lambda x: x.reshape(2, 2, 6, 5).contiguous(memory_format=torch.channels_last),
    "to": lambda x: (x.to(torch.float64, non_blocking=True), x.to(torch.float32, copy=True), x.permute(2, 0, 1).half()),
    "to chain": lambda x: x.to(torch.bfloat16).to(torch.float16).to(torch.int8).to(torch.float32),
    "type_as": lambda x: (x.type_as(x.half()), x.type(torch.float16), x.bool(), x.long(), x.cpu()),
    "repeat": lambda x: (x.repeat(2, 1, 3), x[0].tile(2), torch.hstack([x, x]), torch.vstack([x, x])),
    "joins": lambda x: (torch.dstack([x, x]), torch.column_stack([x, x]), torch.concat((x, x), dim=-1)),
    "stack": lambda x: (torch.stack([x, x], -1), torch.stack([x[0, 0, 0], x[1, 1, 1]])),
}

COMPUTATIONS: dict[str, Op] = {
    "python scalars": lambda x: (x + 1, 2 * x, x / 3, 1 - x, x**2, x // 0.7, x > 0, x.int() & 3, ~x.bool()),
    "a 0-dim tensor does not promote": lambda x: x.half() + torch.tensor(1.5, dtype=torch.float64),
    "an int tensor and a float scalar promote": lambda x: x.int() * 2.5,
    "a 1-dim tensor promotes": lambda x: x.half() + torch.ones(5, dtype=torch.float64),
    "where": lambda x: (torch.where(x > 0, x, 0.0), torch.where(x > 0, x.double(), x)),
    "reductions": lambda x: (x.sum(), x.sum(0), x.mean(1), x.norm(), x.std(0), x.logsumexp(0), x.prod(2)),
    "reductions of permuted": lambda x: (x.permute(2, 0, 1).sum(), x.mT.mean(-1), x[:, 1:5].sum(), x[:, ::2].norm()),
    "several outputs": lambda x: (*x.max(1), *x.topk(2), *x.sort(1), *torch.var_mean(x, 0), *x.aminmax(dim=0)),
    "matmul": lambda x: (x[0] @ x[1].T, torch.einsum("abc,dbc->ad", x, x), torch.outer(x[0, 0], x[0, 1])),
    "functional": lambda x: (torch.nn.functional.linear(x, x[0]), torch.nn.functional.layer_norm(x, (5,))),
    "indices": lambda x: (x[[2, 0]], x[:, torch.tensor([1, 3])], x.index_select(0, torch.tensor([1, 0])), x.flip(1)),
    "scatter": lambda x: torch.slice_scatter(x, x[:, :2], 1, 0, 2).contiguous(),
    "foreach": lambda x: (*torch._foreach_add([x, x[0]], 1), *torch._foreach_mul([x, x[0]], [x, x[1]])),
    "bits of a computed tensor": lambda x: (x + 1).contiguous().view(torch.int32),
    "clamp": lambda x: (x.clamp(-1, 1), x.tril(), x.roll(2, 1), x.cumsum(0), x.softmax(-1)),
}


def assert_same(op: Op, real: torch.Tensor, lazy: torch.Tensor) -> None:
    wanted, got = op(real), op(lazy)
    wanted, got = [list(r) if isinstance(r, Sequence) else [r] for r in (wanted, got)]
    assert len(wanted) == len(got)
    for one, other in zip(wanted, got, strict=True):
        assert isinstance(other, LazyTensor)
        result = other.materialize()
        assert (other.shape, other.dtype) == (result.shape, result.dtype) == (one.shape, one.dtype)
        assert other.stride() == one.stride()
        assert bits(result) == bits(one)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", [*VIEWS, *MOVES, *COMPUTATIONS])
def test_an_op_gives_what_eager_torch_gives(name: str, operand: str) -> None:
    op = (VIEWS | MOVES | COMPUTATIONS)[name]
    real, prepare = OPERANDS[operand]
    assert_same(op, prepare(real), prepare(LazyTensor.from_tensor(real)))


@pytest.mark.parametrize("name", [*VIEWS, *MOVES])
def test_views_and_moves_run_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    lazy = LazyTensor.from_tensor(X)
    monkeypatch.setattr("hf_stream.lazy.deferred.execute", fail)
    monkeypatch.setattr("hf_stream.lazy.run.execute", fail)
    (VIEWS | MOVES)[name](lazy)


@pytest.mark.parametrize(
    "op",
    [
        torch.view_as_real,
        lambda x: x.real,
        lambda x: x.imag,
        lambda x: x.H,
        lambda x: x.conj(),
        lambda x: x.conj().resolve_conj(),
        lambda x: x.conj().imag,
        lambda x: torch.view_as_complex(torch.view_as_real(x)),
        lambda x: torch.view_as_real_copy(x),
        lambda x: x.abs(),
        lambda x: torch.cat([x, x.conj()]),
    ],
)
def test_complex_numbers(op: Op) -> None:
    for real in (C, seeded((4, 3), torch.complex64).T):
        wanted, got = op(real), op(LazyTensor.from_tensor(real))
        assert bits(got.materialize()) == bits(wanted)
    assert bits(LazyTensor.from_tensor(C.conj()).materialize()) == bits(C.conj())
    assert bits(LazyTensor.from_tensor(C.conj().imag).materialize()) == bits(C.conj().imag)


ALL_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_as_a_leaf_and_joined(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * 4 * dtype.itemsize,), dtype=torch.uint8)
    real = raw.view(dtype).view(6, 4)
    lazy = LazyTensor.from_tensor(real)

    def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
        return got.dtype == wanted.dtype and torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))

    assert same(lazy.materialize(), real)
    assert same(lazy[1:, ::2].materialize(), real[1:, ::2])
    assert same(lazy.t().materialize(), real.t())
    assert same(torch.cat([lazy, lazy[:2]], 0).t()[1:].materialize(), torch.cat([real, real[:2]], 0).t()[1:])
    assert same(torch.stack([lazy, real])[:, 1].materialize(), torch.stack([real, real])[:, 1])
    assert lazy[2, 3].materialize().shape == ()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [dtype for dtype in ALL_DTYPES if dtype != torch.float4_e2m1fn_x2], ids=str)
def test_casts_to_every_dtype(dtype: torch.dtype) -> None:
    real = torch.tensor([[0.0, 1.5, 2.0], [3.25, 0.1, 7.0]])
    lazy = LazyTensor.from_tensor(real)
    for cast in (lambda x: x.to(dtype), lambda x: torch.cat([x, x]).t().to(dtype)[1:], lambda x: x.half().to(dtype)):
        assert bits(cast(lazy).materialize()) == bits(cast(real))
    assert bits(torch.zeros(2, 3, dtype=dtype).copy_(lazy)) == bits(real.to(dtype))


JOINED = {
    "int64": torch.arange(12).reshape(3, 4),
    "bool": torch.arange(12).reshape(3, 4) > 3,
    "bfloat16": seeded((3, 4), torch.bfloat16),
    "float32": seeded((3, 4), torch.float32),
    "float8": seeded((3, 4), torch.float8_e4m3fn),
    "uint16": torch.arange(12).reshape(3, 4).to(torch.uint16),
    "complex": C,
    "legacy empty": torch.empty(0),
    "0-dim": torch.tensor(3.0),
    "1-dim": torch.ones(4),
    "other shape": torch.randn(2, 5),
}


def outcome(join: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor | Exception:
    try:
        return join(*args)
    except (RuntimeError, IndexError, TypeError) as error:
        return error


@pytest.mark.parametrize("second", JOINED)
@pytest.mark.parametrize("first", JOINED)
@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: torch.cat([a, b, a], -2),
        lambda a, b: torch.stack([a, b], -1),
        lambda a, b: torch.stack([a, b], 3),
    ],
    ids=["cat", "cat 1", "cat -2", "stack -1", "stack 3"],
)
def test_joins_of_lazy_and_real_tensors_promote_and_fail_as_torch_does(
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], first: str, second: str
) -> None:
    a, b = JOINED[first], JOINED[second]
    for left, right in (
        (LazyTensor.from_tensor(a), b),
        (a, LazyTensor.from_tensor(b)),
        (LazyTensor.from_tensor(a), LazyTensor.from_tensor(b)),
    ):
        wanted, got = outcome(join, a, b), outcome(join, left, right)
        if isinstance(wanted, Exception):
            assert (type(got), str(got)) == (type(wanted), str(wanted))
        else:
            got = LazyTensor.from_tensor(got).materialize()
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            assert bits(got) == bits(wanted)


def test_tensors_on_several_devices_are_not_joined() -> None:
    with pytest.raises(LazyTensorError, match="'cpu' and 'meta'"):
        torch.cat([LazyTensor.from_tensor(X), X.to("meta")])
    with pytest.raises(RuntimeError):
        LazyTensor.from_tensor(X) + X.to("meta")


def test_a_device_is_recorded() -> None:
    moved = torch.ops.aten._to_copy(LazyTensor.from_tensor(X), device=torch.device("cuda", 0))
    assert moved.device == torch.device("cuda", 0)
    meta = LazyTensor.from_tensor(X).to("meta")
    assert type(meta) is torch.Tensor
    assert (meta.device.type, meta.shape) == ("meta", X.shape)


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.full_like(x, 2),
        lambda x: torch.randint_like(x, 5),
        lambda x: torch.randint_like(x, 1, 5),
        lambda x: torch.zeros_like(x, dtype=torch.int8, device="meta"),
        lambda x: x.new_zeros(3),
        lambda x: x.new_ones(3, dtype=torch.int8),
        lambda x: x.new_empty(3),
        lambda x: x.new_full((2,), 1),
        lambda x: x.new_tensor([1, 2]),
        lambda x: x.new_empty_strided((2, 2), (1, 2)),
    ],
)
def test_new_tensors_from_metadata_are_real_and_read_nothing(make: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("hf_stream.lazy.deferred.execute")
    for real in (X, X.permute(2, 0, 1)):
        torch.manual_seed(0)
        wanted = make(real)
        torch.manual_seed(0)
        got = make(LazyTensor.from_tensor(real))
        assert type(got) is torch.Tensor
        assert (got.shape, got.dtype, got.device, got.stride()) == (
            wanted.shape,
            wanted.dtype,
            wanted.device,
            wanted.stride(),
        )
        if make not in (torch.empty_like,) and wanted.device.type != "meta" and got.numel() > 4:
            assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([True, False, True, True])],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.where(x > 0)[1],
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.randn_like(x),
    ],
)
def test_data_dependent_and_random_ops_run_at_once(op: Op) -> None:
    torch.manual_seed(0)
    wanted = op(X)
    torch.manual_seed(0)
    got = op(LazyTensor.from_tensor(X))
    assert type(got) is torch.Tensor
    assert torch.equal(got, wanted)


def test_the_generator_is_drawn_from_in_program_order() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.dropout(x), torch.bernoulli(x.sigmoid()), torch.rand(3), torch.rand_like(x) * x]

    torch.manual_seed(0)
    wanted = program(X)
    torch.manual_seed(0)
    lazies = program(LazyTensor.from_tensor(X))
    for got, real in reversed(list(zip(lazies, wanted, strict=True))):
        assert torch.equal(LazyTensor.from_tensor(got).materialize(), real)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0, 0, 0].item(),
        lambda x: float(x[0, 0, 0]),
        lambda x: int(x[0, 0, 0]),
        lambda x: bool(x[0, 0, 0]),
        lambda x: complex(x[0, 0, 0]),
        lambda x: 2.0 in x,
        lambda x: float(X[1, 1, 1]) in x,
        lambda x: torch.equal(x, X),
        lambda x: torch.allclose(x, X + 1),
        lambda x: x.tolist(),
        lambda x: f"{x[0, 0, 0]:.3f}",
        lambda x: [len(x), x.dim(), x.numel(), x.nbytes, x.element_size(), x.is_contiguous(), x.storage_offset()],
        lambda x: [x.is_pinned(), x.is_floating_point(), x.is_complex(), x.layout, x.is_meta, x.is_same_size(X)],
        lambda x: torch.result_type(x, 1),
    ],
)
def test_python_values_are_those_of_torch(ask: Op) -> None:
    assert ask(LazyTensor.from_tensor(X)) == ask(X)


def test_a_shape_error_is_torchs_own() -> None:
    lazy = LazyTensor.from_tensor(X[0])
    for wrong in (
        lambda x: x @ x,
        lambda x: x[9],
        lambda x: x.t().view(-1),
        lambda x: x.reshape(7, 7),
        lambda x: x + torch.ones(7),
    ):
        with pytest.raises((RuntimeError, IndexError)) as wanted:
            wrong(X[0])
        with pytest.raises(wanted.type) as got:
            wrong(lazy)
        assert str(got.value) == str(wanted.value)


def test_a_window_beyond_the_storage_is_refused() -> None:
    with pytest.raises(LazyTensorError, match="element 99 is wanted, but the tensor under the view has 30"):
        LazyTensor.from_tensor(X[0].clone()).as_strided((100,), (1,))


def test_under_inference_mode_no_grad_and_autocast() -> None:
    lazy = LazyTensor.from_tensor(X)
    with torch.inference_mode():
        rows = torch.cat([lazy, lazy.mT.reshape(4, 6, 5)])[1:]
        assert bits((rows + 1).materialize()) == bits(torch.cat([X, X.mT.reshape(4, 6, 5)])[1:] + 1)
        assert torch.zeros_like(X).copy_(lazy).equal(X)
        assert lazy[0, 0, 0].item() == X[0, 0, 0].item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorded, wanted = lazy[0] @ lazy[0].T, X[0] @ X[0].T
        assert recorded.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(recorded.materialize(), wanted)
    recorded, wanted = lazy[0] @ lazy[0].T, X[0] @ X[0].T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(recorded.materialize(), wanted)


def test_under_a_default_device(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xaa" * 3 + bits(X))
    file = FileStorage(tmp_path / "x")
    for lazy in (LazyTensor.from_tensor(X), LazyTensor.from_storage(file, X.dtype, X.shape, 3)):
        wanted = X.permute(2, 0, 1).double() + 1
        with torch.device("meta"):
            got = (lazy.permute(2, 0, 1).double() + 1).materialize()
        assert torch.equal(got, wanted)


def test_strides_that_differ_from_those_of_the_meta_version() -> None:
    # Eager torch gives a row-major result here, and its meta version does not.
    lazy = 2 ** LazyTensor.from_tensor(X).transpose(0, 1)
    assert bits(lazy.materialize()) == bits(2 ** X.transpose(0, 1))


def test_function_transforms() -> None:
    lazy = LazyTensor.from_tensor(X)
    assert torch.equal(torch.func.vmap(lambda x: x.sum())(lazy).materialize(), torch.func.vmap(lambda x: x.sum())(X))
    linear = torch.nn.Linear(5, 6)
    got = torch.func.functional_call(linear, {"weight": lazy[0], "bias": lazy[0, :, 0]}, (X,))
    assert torch.equal(got.materialize(), torch.nn.functional.linear(X, X[0], X[0, :, 0]))


def test_a_view_of_a_join_reads_only_the_parts_it_shows() -> None:
    parts = [LazyTensor.from_tensor(torch.ones(10, 4)) for _ in range(3)]
    assert sum(region.nbytes for region in reads([torch.cat(parts)[8:12]])) == 4 * 4 * 4
    assert sum(region.nbytes for region in reads([torch.stack(parts, 1)[:, 1, :2]])) == 10 * 2 * 4
    assert sum(region.nbytes for region in reads([parts[0].unsqueeze(0).expand(50, 10, 4)])) == 160


def test_bits_of_narrowed_tiles_under_another_dtype() -> None:
    x = torch.arange(24, dtype=torch.int16).reshape(3, 8)
    lazy = LazyTensor.from_tensor(x)
    pair = torch.cat([lazy, lazy])[:, :4]
    assert torch.equal(pair.view(torch.int32).materialize(), torch.cat([x, x])[:, :4].view(torch.int32))
    y = x.float()
    wide = torch.cat([LazyTensor.from_tensor(y)] * 2)[:, :6].unflatten(1, (3, 2))
    expected = torch.view_as_complex(torch.cat([y, y])[:, :6].unflatten(1, (3, 2)))
    assert torch.equal(torch.view_as_complex(wide).materialize(), expected)


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 1, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 3, 1, 1), (2, 1, 3, 1)])
def test_joined_images_keep_their_channels_last(join: Callable, order: tuple[int, ...], size: tuple[int, ...]) -> None:
    x = seeded([size[dim] for dim in order], torch.float32).permute([order.index(dim) for dim in range(4)])
    row_major = x.contiguous()
    for parts in ([x, x], [x, row_major], [row_major, x]):
        for dim in range(4):
            expected = join(parts, dim)
            lazy = join([LazyTensor.from_tensor(part) for part in parts], dim)
            assert lazy.stride() == expected.stride()
            assert torch.equal(lazy.materialize(), expected)
            assert torch.equal(lazy.sum((0, 2)).materialize(), expected.sum((0, 2)))


def test_the_current_device_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    moved = [
        torch.ops.aten._to_copy(LazyTensor.from_tensor(X), device=torch.device(name)) for name in ("cuda", "cuda:3")
    ]
    assert torch.cat(moved).device == torch.device("cuda", 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_of_half_precision_equals_eager(dtype: torch.dtype) -> None:
    real = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = torch.nn.functional.layer_norm(LazyTensor.from_tensor(real), (8,))
    assert torch.equal(materialize([result])[0], torch.nn.functional.layer_norm(real, (8,)))
