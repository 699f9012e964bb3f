from __future__ import annotations

import pytest
import torch

from hf_stream.lazy import LazyTensor, defer, fingerprint, materialize, reads, working_set


class Doubled:
    """A function that says what it does."""

    def __init__(self, by: int = 2) -> None:
        self.by = by
        self.calls = 0

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (x + y) * self.by

    def __repr__(self) -> str:
        return f"Doubled({self.by})"


X, Y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)


def lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor.from_tensor(tensor)


def test_a_function_runs_when_its_result_is_needed_once_for_all_of_it() -> None:
    function = Doubled()
    result = defer(function, [lazy(X), Y], X.shape, X.dtype)
    assert isinstance(result, LazyTensor)
    assert function.calls == 0
    first, second = materialize([result[0], torch.cat([result.T, result.T])])
    assert torch.equal(first, ((X + Y) * 2)[0])
    assert torch.equal(second, torch.cat([((X + Y) * 2).T] * 2))
    assert function.calls == 1


def test_with_real_tensors_it_runs_at_once_and_with_meta_tensors_never() -> None:
    function = Doubled()
    assert torch.equal(defer(function, [X, Y], X.shape, X.dtype), (X + Y) * 2)
    meta = defer(function, [X.to("meta"), lazy(Y)], (2, 3), torch.float16)
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", (2, 3), torch.float16)
    assert function.calls == 1


def test_what_it_reads_and_holds_is_known_before() -> None:
    result = defer(Doubled(), [lazy(X)[:, 1:].to(torch.float64), Y[:, 1:]], (2, 2), torch.float64)
    assert sum(region.nbytes for region in reads([result])) == 16
    assert working_set([result]) == 2 * 4 * 8


def test_two_that_look_the_same_count_as_the_same() -> None:
    marks = [fingerprint([defer(Doubled(by), [lazy(X), Y], X.shape, X.dtype)]) for by in (2, 2, 3)]
    assert marks[0] == marks[1] != marks[2]


def test_a_result_of_another_shape_than_promised_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Doubled\(2\) gave torch.float32 of shape \[2, 3\]"):
        defer(Doubled(), [lazy(X), Y], (3, 2), X.dtype).materialize()
