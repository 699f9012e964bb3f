"""Lowering: how many copies a composition of views and joins takes, and how long finding them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import seeded

from hf_stream.copying.plan import Copy, Plan
from hf_stream.copying.region import Region
from hf_stream.errors import LazyTensorError
from hf_stream.lazy import LazyTensor
from hf_stream.lazy import lower as lowering
from hf_stream.lazy.lower import Pending, lower


def entries(lazy: LazyTensor) -> list[Copy | Pending]:
    return list(lower(lazy, Region.of(torch.empty(lazy.shape, dtype=lazy.dtype))))


def lazy_zeros(*shape: int) -> LazyTensor:
    return LazyTensor.from_tensor(torch.zeros(1).expand(shape).contiguous())


@pytest.mark.parametrize(
    ("view", "count"),
    [
        (lambda x, y: torch.cat([x, y]), 2),
        (lambda x, y: torch.cat([x, y], 1), 2),
        (lambda x, y: torch.cat([x, y])[10:50], 1),
        (lambda x, y: torch.cat([x, y])[::3], 2),
        (lambda x, y: torch.cat([x, y]).t()[5:9].contiguous(), 2),
        (lambda x, y: torch.stack([x, y]).view(2, 8, 8, 4, 4).permute(0, 2, 1, 4, 3).reshape(128, 16), 2),
        (lambda x, y: torch.stack([x, y], 1).flatten(0, 1), 2),
        (lambda x, y: torch.cat([x, y]).reshape(-1)[3:-3], 6),
        (lambda x, y: x.t().contiguous().view(4, 4, 64).half().transpose(0, 1), 1),
        (lambda x, y: x.t().reshape(-1).view(32, 32), 1),
        (lambda x, y: x.t().reshape(-1)[: 16 * 48].view(16, 48), 6),
        (lambda x, y: x.t().reshape(-1).unfold(0, 8, 1), 16),
        (lambda x, y: torch.cat([x, y])[:0], 0),
        (lambda x, y: x.expand(1000, 64, 16), 1),
    ],
)
def test_the_number_of_copies(view, count: int) -> None:
    assert len(entries(view(lazy_zeros(64, 16), lazy_zeros(64, 16)))) <= count


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_window_of_any_tiles_is_filled_exactly(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, 3))
    reals = [seeded(shape, torch.float32, seed) for seed in range(count)]
    order = data.draw(st.permutations(range(len(shape))))
    # Parts that are row-major in another order than the tiles.
    lazies = [
        LazyTensor.from_tensor(x.permute(order).contiguous()).permute(torch.argsort(torch.tensor(order)).tolist())
        for x in reals
    ]
    real, lazy = torch.cat(reals, dim), torch.cat(lazies, dim)
    size = data.draw(st.lists(st.integers(1, 4), max_size=3))
    offset = data.draw(st.integers(0, real.numel() - 1))
    stride, left = [], real.numel() - 1 - offset
    for n in size:
        stride.append(data.draw(st.integers(0, left // (n - 1) if n > 1 else 5)))
        left -= (n - 1) * stride[-1]
    got = lazy.as_strided(size, stride, offset)
    out = torch.empty(size)
    copies = list(lower(got, Region.of(out)))
    Plan.of(copies).check_complete([Region.of(out)])
    assert torch.equal(got.materialize(), real.as_strided(size, stride, offset))


def test_rows_that_do_not_fit_are_grouped_by_their_period() -> None:
    # 4096 rows of 3000 from rows of 4096: they lie the same way again every 512 rows.
    assert len(entries(lazy_zeros(4096, 3000).t().reshape(4096, 3000))) <= 1024 + 512


def test_windows_that_would_fall_to_pieces_are_read_from_tiles_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = seeded((64, 64), torch.bfloat16)

    def misfit(x: torch.Tensor) -> torch.Tensor:
        flat = x.t().reshape(-1)[: 61 * 67].view(61, 67).t().reshape(-1)[: 59 * 69].view(59, 69)
        return torch.cat([flat, flat], 1).float()[:, 5:]

    unlimited = misfit(LazyTensor.from_tensor(real))
    assert all(isinstance(entry, Copy) for entry in entries(unlimited))
    monkeypatch.setattr(lowering, "MAX_CUTS", 20)
    limited = misfit(LazyTensor.from_tensor(real))
    found = entries(limited)
    assert len(found) < 70
    assert any(isinstance(entry, Pending) for entry in found)
    assert torch.equal(limited.materialize(), misfit(real))
    assert torch.equal((limited + 1).materialize(), misfit(real) + 1)


def test_copies_stay_few_for_big_tensors_reshaped_badly() -> None:
    big = LazyTensor.from_region(Region.contiguous(Region.of(torch.empty(1)).storage, torch.float32, (4096, 4096)))
    rows = big.t().reshape(-1)[: 4095 * 4097].view(4097, 4095)
    for lazy in (rows, rows[:, :10], rows.t().reshape(-1)[: 4093 * 4099].view(4093, 4099)[:, :10]):
        destination = Region.contiguous(Region.of(torch.empty(1)).storage, lazy.dtype, lazy.shape)
        assert sum(1 for _ in lower(lazy, destination)) <= lowering.MAX_CUTS + 2


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:-1], lambda x: x.t()[:, ::2], lambda x: x.reshape(-1)[1:]])
def test_joins_of_many_parts_take_a_few_steps_each(view, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = 0

    class CountedBox(lowering.Box):
        def __init__(self, *args: object) -> None:
            nonlocal boxes
            boxes += 1
            super().__init__(*args)

    monkeypatch.setattr(lowering, "Box", CountedBox)
    found = entries(view(torch.cat([lazy_zeros(2, 2)] * 10_000)))
    assert 10_000 <= len(found) <= 10_002
    assert boxes <= 2 * 10_000 + 10


def test_a_destination_of_another_size_is_refused() -> None:
    with pytest.raises(LazyTensorError, match=r"'w': cannot fill a region of size \[3\] from shape \[2\]"):
        list(lower(lazy_zeros(2), Region.of(torch.empty(3)), "w"))
