"""Functions that make memory and fill it: planned, they compute nothing, and give what eager PyTorch gives."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_peaks import in_fresh_process
from programs import bits, computations, movements, seeded

from hf_stream.copying.region import Region
from hf_stream.errors import LazyTensorError
from hf_stream.lazy import LazyTensor, fingerprint, materialize, planned, reads, working_set

A, B = (seeded((6, 4), torch.float32, seed) for seed in (0, 1))
MIB = 1 << 20
Program = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


@pytest.fixture
def stored(tmp_path: Path, counting_file) -> tuple[list[LazyTensor], torch.Tensor]:
    """A and B in a file, and how often each of its bytes has been read."""
    (tmp_path / "x").write_bytes(bits(A) + bits(B))
    file = counting_file(tmp_path / "x")
    regions = (Region.contiguous(file, A.dtype, A.shape, offset) for offset in (0, 96))
    return [LazyTensor.from_region(region) for region in regions], file.read_counts


def halves(a, b):
    out = torch.empty(12, 4)
    out[:6] = a
    out[6:] = b * 2
    return out


def border(a, b):
    out = torch.zeros_like(a, dtype=torch.float64)
    out[1:4, ::2] = b[2:5, 1::2]
    out += 1
    return out


def changed_results(a, b):
    x = a * 2
    x[0] = 7
    y = x.clone()
    x.mul_(3)
    return x, y, torch.cat([x, y]).neg_()


def one_buffer_again_and_again(a, b):
    buffer, copies = a.new_empty(6, 4), []
    for tensor in (a, b):
        buffer.copy_(tensor)
        copies += [buffer + 0, buffer[1:3].clone(), torch.stack([buffer, a])]
    return [buffer, *copies]


def columns(a, b):
    out = torch.full((6, 8), -1, dtype=torch.float64)
    out[:, ::2] = a
    out.T[1::2] = b.T
    return out.t()


def masks(a, b):
    out = torch.empty(6, 4)
    out[torch.tensor([True, False] * 3)] = 1.5
    out[1::2] = b[1::2]
    out[a > 0] = 0
    out[:, 0].copy_(torch.arange(6))
    return out, torch.where(out > 1, out, torch.ones(4))


def reads_of_its_own(a, b):
    out = torch.empty(4, 6)
    out[1:] = a.T[1:]
    out[0] = out[1]
    out[2:] = out[:2].clone()
    out[3].add_(out[1])
    return out[:, :3], out[:, 3:]


def other_dtypes_of_the_same_memory(a, b):
    clone, made = a.clone(), torch.zeros(6, 4)
    clone.view(torch.int32).add_(1)
    made.view(torch.uint8)[:, 3] = 64
    pairs = torch.zeros(3, 2, dtype=torch.complex64)
    torch.view_as_real(pairs).copy_(b[:3].view(3, 2, 2))
    return clone, made, pairs


def out_arguments(a, b):
    out = torch.empty(2, 6, 4)
    torch.stack([a, b], out=out)
    return out, torch.add(a, b, out=torch.empty(6, 4))


def like_a_transposed_one(a, b):
    out = torch.empty_like(a.T)
    out.copy_(b.T)
    out[1:].neg_()
    out.T.view(-1)[0] = 5
    return out


def sizes_alone(a, b):
    index = torch.arange(6).view(2, 3).T.reshape(6)
    return a[index], b @ torch.eye(4), torch.linspace(0, 1, 5), torch.ones(3, dtype=torch.int8)


def padded(a, b):
    return torch.cat([a, torch.zeros(2, 4)]), torch.nn.functional.pad(b, (1, 0))


PROGRAMS = [
    halves,
    border,
    changed_results,
    one_buffer_again_and_again,
    columns,
    masks,
    reads_of_its_own,
    other_dtypes_of_the_same_memory,
    out_arguments,
    like_a_transposed_one,
    sizes_alone,
    padded,
]


def several(result: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_read_and_the_results_are_those_of_eager_torch(stored, caplog, program: Program) -> None:
    lazies, counts = stored
    wanted, got = several(program(A, B)), several(planned(program, *lazies))
    assert all(isinstance(tensor, LazyTensor) for tensor in got)
    assert not counts.any()
    assert [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in got] == [
        (tensor.shape, tensor.dtype, tensor.stride()) for tensor in wanted
    ]
    assert list(map(bits, materialize(got))) == list(map(bits, wanted))
    assert list(map(bits, materialize(got))) == list(map(bits, wanted))  # a second time
    assert caplog.records == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_result_alone_is_right_as_well(stored, program: Program) -> None:
    wanted = several(program(A, B))
    for place, tensor in enumerate(wanted):
        assert bits(several(planned(program, *stored[0]))[place].materialize()) == bits(tensor)


def test_movement_stays_movement_and_reads_what_it_needs(stored) -> None:
    lazies, counts = stored
    joined = planned(lambda a, b: torch.cat([a, b.flip(0)[:0], torch.zeros(1, 4), b]).T.contiguous()[1:3], *lazies)
    assert sum(region.nbytes for region in reads([joined[:, :7]])) == 6 * 2 * 4
    assert bits(joined[:, :6].materialize()) == bits(A.T[1:3])
    assert counts.sum() == 6 * 2 * 4


def test_a_function_on_real_tensors_runs_as_ever() -> None:
    result = planned(halves, A, B)
    assert bits(materialize([result])[0]) == bits(halves(A, B))


def test_draws_come_in_the_order_of_the_program(stored) -> None:
    def noisy(a, b):
        out = torch.empty(6, 4)
        out.normal_()
        out[1] += torch.rand(4)
        return out + a, torch.empty(3).uniform_()

    results = []
    for run in (lambda: noisy(A, B), lambda: planned(noisy, *stored[0])):
        torch.manual_seed(5)
        results.append([*run(), torch.rand(2)])
    plain, ours = results
    assert list(map(bits, materialize(ours))) == list(map(bits, plain))
    assert not stored[1][96:].any()


def test_what_does_not_fit_is_refused_at_once_in_the_words_of_torch(stored) -> None:
    def misfit(a, b):
        out = torch.empty(5, 4)
        out[:] = a
        return out

    with pytest.raises(RuntimeError) as plain:
        misfit(A, B)
    with pytest.raises(RuntimeError) as ours:
        planned(misfit, *stored[0])
    assert str(ours.value) == str(plain.value)
    assert not stored[1].any()


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: x[0].zero_(), lambda x: x.view(-1).mul_(2), lambda x: x.detach().neg_()]
)
def test_tensors_that_are_given_are_never_written_to(stored, write) -> None:
    with pytest.raises(LazyTensorError, match="would write into a LazyTensor"):
        planned(lambda a, b: (write(a), torch.empty(3))[1], *stored[0])
    assert not stored[1].any()


def test_results_are_not_written_to_once_they_are_planned(stored) -> None:
    result = planned(halves, *stored[0])
    with pytest.raises(LazyTensorError, match="would write into a LazyTensor"):
        result[0] = 1
    assert bits(result.materialize()) == bits(halves(A, B))


def resized(a, b):
    return torch.cat([a, b], out=torch.empty(0))


def with_another_shape(a, b):
    ones = torch.ones(6)
    ones.unsqueeze_(1)
    return ones * a


def through_numpy(a, b):
    out = torch.zeros(6, 4)
    out.numpy()[1] = 3
    return out + a


@pytest.mark.parametrize("program", [resized, with_another_shape, through_numpy])
def test_what_cannot_be_recorded_runs_now_with_a_word(stored, caplog, program: Program) -> None:
    got = planned(program, *stored[0])
    assert bits(materialize([got])[0]) == bits(program(A, B))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{program.__name__} cannot be planned, and runs now" in record.getMessage()


@pytest.mark.parametrize(
    ("program", "wanted", "what"),
    [
        (lambda a, b: b[a > 0], B[A > 0], "aten.index.Tensor"),
        (lambda a, b: b * a.max().item(), B * A.max(), "aten._local_scalar_dense"),
        (lambda a, b: a.materialize() + b, A + B, "materialize"),
        (lambda a, b: torch.zeros(6, 4).copy_(a).materialize() + b, A + B, "materialize"),
    ],
)
def test_what_asks_for_values_reads_them_now_with_a_word(stored, caplog, program, wanted, what: str) -> None:
    got = planned(lambda a, b: (program(a, b), program(a, b))[1], *stored[0])
    assert bits(materialize([got])[0]) == bits(wanted)
    assert stored[1][:96].all()
    (record,) = caplog.records
    assert f"asks for values while it is planned ({what}" in record.getMessage()
    assert " 96 bytes are read" in record.getMessage() or what == "aten.index.Tensor"


def test_fingerprints_tell_writes_apart(stored) -> None:
    def into(*rows):
        def program(a, b):
            out = torch.zeros(6, 4)
            for row in rows:
                out[row] = a[row]
            return out

        return planned(program, *stored[0])

    expressions = {
        "one": into(0),
        "other": into(1),
        "both": into(0, 1),
        "b": planned(lambda a, b: torch.zeros(6, 4).copy_(b), *stored[0]),
        "add": planned(lambda a, b: torch.zeros(6, 4).add_(b), *stored[0]),
        "ones": planned(lambda a, b: torch.ones(6, 4).add_(b), *stored[0]),
    }
    prints = {name: fingerprint([lazy]) for name, lazy in expressions.items()}
    assert len(set(prints.values())) == len(prints)
    assert fingerprint([into(0, 1)]) == prints["both"]


def test_the_working_set_counts_memory_that_is_filled_once(stored) -> None:
    lazies, _ = stored
    # The buffer, and what is written into it at a time.
    filled = planned(lambda a, b: torch.empty(12, 4).copy_(torch.cat([a, b])), *lazies)
    assert working_set([filled]) == 192 + 192

    def rows(a, b):
        out = torch.empty(12, 4)
        for row in range(6):
            out[row] = a[row]
            out[row + 6] = b[row]
        return out

    assert working_set([planned(rows, *lazies)]) == 192 + 16


MEASURED = """
import json, sys
import torch
from hf_stream.lazy import LazyTensor, materialize, planned, working_set
from hf_stream.storage import FileStorage
from memory_peaks import anonymous, peak_of

MIB = 1 << 20
file = FileStorage(sys.argv[1])
a, b = (LazyTensor.from_storage(file, torch.float32, (64, 1 << 18), start * 64 * MIB) for start in (0, 1))

def pieces(a, b):
    out = torch.empty(128, 1 << 18)
    for row in range(64):
        out[2 * row] = a[row]
        out[2 * row + 1] = b[row] * 2
    return out

def whole(a, b):
    out = torch.zeros(128, 1 << 18)
    out[:64] = a
    out[64:] = b
    return out.sum(0)

def kept(a, b):
    x = a * 2
    y = x + 1
    x.neg_()
    return torch.cat([x[:1], y[:1]])

small = LazyTensor.from_storage(file, torch.float32, (8,), 0)
materialize([planned(lambda x: torch.empty(8).copy_(x) + 1, small)])  # imports, and threads' stacks
torch.ones(1 << 20).sum(), torch.ones(1 << 20).neg_()
for program in (pieces, whole, kept):
    before = anonymous()
    result = planned(program, a, b)
    held = anonymous() - before
    beyond = result.nbytes
    print(json.dumps([program.__name__, held, working_set([result]), peak_of(lambda: materialize([result])) - beyond]))
"""


def test_planning_holds_nothing_and_running_holds_what_the_working_set_says(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(128 * MIB))
    for line in in_fresh_process(MEASURED, tmp_path / "x").splitlines():
        name, held, promised, peak = json.loads(line)
        assert held < 2 * MIB, name
        assert promised - 8 * MIB < peak < promised + 8 * MIB, (name, promised / MIB, peak / MIB)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[torch.Tensor], Program]:
    """Real inputs, and a program of views, results, new tensors and writes that runs on them, or on lazies."""
    shape = draw(st.sampled_from([(3, 4), (2, 3, 2), (5,), (4, 4), (0, 3)]))
    inputs = [seeded(shape, draw(dtypes), seed) for seed in (0, 1)]
    steps: list[Callable[[list[torch.Tensor]], object]] = []
    tensors = [tensor.clone() for tensor in inputs]
    given_ones = len(tensors)

    def attempt(step: Callable[[list[torch.Tensor]], object]) -> None:
        # What eager torch refuses is left out; nothing has been written by then.
        try:
            step(tensors)
        except (RuntimeError, NotImplementedError, IndexError, TypeError):
            return
        steps.append(step)

    for _ in range(draw(st.integers(4, 14))):
        kind = draw(st.sampled_from(["new", "view", "compute", "write", "write", "write"]))
        i = draw(st.integers(0, len(tensors) - 1))
        if kind == "new" or len(tensors) == given_ones:
            make = draw(makers(shape))
            attempt(lambda ts, i=i, make=make: ts.append(make(ts[i])))
            continue
        if kind == "compute":
            compute = draw(computations(tuple(tensors[i].shape), tensors[i].dtype))
            # Results that are their argument again would be written to through the argument.
            attempt(lambda ts, i=i, compute=compute: ts.append(compute(ts[i]).clone()))
            continue
        i = draw(st.integers(given_ones, len(tensors) - 1))
        if kind == "view":
            move = draw(movements(tuple(tensors[i].shape)))
            attempt(lambda ts, i=i, move=move: ts.append(move(ts[i])))
        else:
            fitting = [j for j, tensor in enumerate(tensors) if tensor.shape == tensors[i].shape]
            j = draw(st.sampled_from(fitting))
            write = draw(writes)
            attempt(lambda ts, i=i, j=j, write=write: write(ts[i], ts[j]))

    def program(*given: torch.Tensor) -> list[torch.Tensor]:
        made = list(given)
        for step in steps:
            step(made)
        return made[given_ones:]

    return inputs, program


dtypes = st.sampled_from([torch.float32, torch.int32, torch.bfloat16, torch.bool, torch.int64])


def makers(shape: tuple[int, ...]) -> st.SearchStrategy[Callable[[torch.Tensor], torch.Tensor]]:
    return st.sampled_from(
        [
            lambda x: torch.zeros(shape, dtype=x.dtype),
            lambda x: torch.full(shape, 3, dtype=x.dtype),
            lambda x: torch.ones(shape),
            lambda x: torch.zeros_like(x),
            lambda x: torch.full_like(x.T if x.dim() == 2 else x, 1),
            lambda x: x.new_ones(shape),
            lambda x: x.new_zeros((*shape, 2)),
            lambda x: torch.arange(4).view(2, 2),
            lambda x: x.clone(),
            lambda x: torch.cat([x, x]),
        ]
    )


writes: st.SearchStrategy[Callable[[torch.Tensor, torch.Tensor], object]] = st.sampled_from(
    [
        lambda x, y: x.copy_(y),
        lambda x, y: x.fill_(1),
        lambda x, y: x.zero_(),
        lambda x, y: x.add_(y),
        lambda x, y: x.mul_(2),
        lambda x, y: x[1:].copy_(x[:-1].clone()),
        lambda x, y: x.__setitem__(0, y[0]),
        lambda x, y: x.__setitem__((..., 0), 1),
        lambda x, y: x[..., ::2].copy_(y),
        lambda x, y: x.masked_fill_(y > 0, 0),
        lambda x, y: x.T.copy_(y) if x.dim() == 2 else x.neg_(),
        lambda x, y: x.__setitem__(torch.tensor([0]), y[:1]),
        lambda x, y: torch.add(x, y, out=x),
    ]
)


@settings(max_examples=300)
@given(programs())
def test_any_program_with_writes_equals_eager_torch(case: tuple[list[torch.Tensor], Program]) -> None:
    inputs, program = case
    wanted = program(*(tensor.clone() for tensor in inputs))
    lazies = planned(program, *map(LazyTensor.from_tensor, inputs))
    got = materialize(lazies)
    assert [(tensor.shape, tensor.dtype) for tensor in got] == [(tensor.shape, tensor.dtype) for tensor in wanted]
    assert list(map(bits, got)) == list(map(bits, wanted))
