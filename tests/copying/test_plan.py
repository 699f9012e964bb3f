from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_stream.copying import Copy, Plan, Region, execute
from hf_stream.copying.overlap import Extent, Touch, find_conflict
from hf_stream.errors import CopyError
from hf_stream.storage import FileStorage, MemoryStorage


def region(tensor: torch.Tensor) -> Region:
    return Region.of(tensor)


def fresh(like: torch.Tensor) -> Region:
    return Region.of(torch.zeros(like.shape, dtype=like.dtype))


def test_region_of_a_view():
    tensor = torch.zeros(6, 4, dtype=torch.int16)[1:, ::2]
    shown = Region.of(tensor)
    assert (shown.size, shown.stride, shown.offset) == ((5, 2), (4, 2), 8)
    assert (shown.numel, shown.nbytes, shown.span) == (10, 20, (8, 8 + 2 * (4 * 4 + 2 + 1)))
    assert not shown.is_contiguous
    assert shown.aligned
    assert shown.tensor().data_ptr() == tensor.data_ptr()


def test_repeats_count_once():
    assert Region.of(torch.zeros(3, 1).expand(3, 7)).nbytes == 12
    assert Region.of(torch.zeros(10).unfold(0, 4, 1)).nbytes == 40


@settings(max_examples=100, deadline=None)
@given(size=st.lists(st.integers(0, 3), max_size=4), order=st.randoms())
def test_is_contiguous_agrees_with_torch(size, order):
    dims = list(range(len(size)))
    order.shuffle(dims)
    tensor = torch.zeros(size).permute(dims)
    assert Region.of(tensor).is_contiguous == tensor.is_contiguous()


def test_regions_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"'x': a copy needs regions of one size, got \[3\].*\[4\]"):
        Copy(Region.of(torch.zeros(3)), Region.of(torch.zeros(4)), name="x")


@pytest.mark.parametrize(("offset", "stride"), [(-4, 1), (4, 1), (0, 2), (16, -1)])
def test_a_region_outside_its_storage_moves_nothing(offset, stride):
    memory = MemoryStorage(torch.zeros(5))
    target = torch.ones(5)
    copies = [
        Copy(Region.of(torch.zeros(2)), Region.of(target[:2]), name="fine"),
        Copy(Region(memory, torch.float32, (5,), (stride,), offset), fresh(torch.zeros(5)), name="layer.weight"),
    ]
    with pytest.raises(CopyError, match=r"'layer.weight': bytes .* lie outside memory \(cpu\), which has 20 bytes"):
        execute(copies)
    assert target.tolist() == [1] * 5


def test_reading_and_writing_the_same_bytes_is_refused(tmp_path):
    tensor = torch.arange(6.0)
    with pytest.raises(CopyError, match=r"'b'.*overlap"):
        execute([Copy(region(tensor[:3]), region(tensor[2:5]), name="b")])
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    (tmp_path / "f").write_bytes(bytes(100))
    (tmp_path / "g").hardlink_to(tmp_path / "f")
    with FileStorage(tmp_path / "f") as src, FileStorage(tmp_path / "g", "r+") as dst:
        ends = [Region.contiguous(src, torch.uint8, (50,), 0), Region.contiguous(dst, torch.uint8, (50,), 49)]
        with pytest.raises(CopyError, match="overlap"):
            execute([Copy(*ends)])
        execute([Copy(ends[0], Region.contiguous(dst, torch.uint8, (50,), 50))])


def test_disjoint_parts_of_one_storage_are_fine():
    tensor = torch.arange(24.0).view(4, 6)
    expected = tensor.clone()
    expected[:, 1::2] = tensor[:, ::2]
    execute([Copy(region(tensor[:, ::2]), region(tensor[:, 1::2]))])
    assert torch.equal(tensor, expected)


def test_a_destination_that_repeats_is_refused():
    for target in (torch.zeros(1, 3).expand(2, 3), torch.zeros(4).as_strided((2, 3), (1, 1))):
        with pytest.raises(CopyError, match=r"'r': the destination in memory .* repeats"):
            execute([Copy(Region.of(torch.zeros(2, 3)), Region.of(target), name="r")])


def cover(*writes: torch.Tensor) -> Plan:
    return Plan.of(Copy(fresh(write), region(write), name=str(i)) for i, write in enumerate(writes))


def test_complete_plans():
    target = torch.zeros(6, 8)
    for parts in (
        [target],
        [target.T],
        [target[:, :3], target[:, 3:]],
        [target[::2], target[1::2]],
        [target[:2, :4], target[2:, :4], target[:, 4:6], target[:, 6:]],
        [*target.view(6, 2, 4).unbind(1)],
    ):
        cover(*parts).check_complete([region(target)])


def test_incomplete_plans_are_told():
    target = torch.zeros(6, 8)
    with pytest.raises(CopyError, match="16 of the bytes 0 to 192 would never be written"):
        cover(target[:5], target[5, 4:]).check_complete([region(target)])
    with pytest.raises(CopyError, match=r"'1'.*'0'.*overlap"):
        cover(target[:, :4], target[:, 3:]).check_complete([region(target)])
    with pytest.raises(CopyError, match=r"'0': bytes 0 to 192 of .* are not to be written"):
        cover(target).check_complete([region(target[:3])])
    with pytest.raises(CopyError, match="192 of the bytes"):
        cover().check_complete([region(target)])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_conflicts_are_those_of_a_byte_map(data):
    memory = MemoryStorage(torch.zeros(200, dtype=torch.uint8))
    touches, bytes_of = [], []
    for owner in range(data.draw(st.integers(2, 5))):
        size = data.draw(st.lists(st.integers(1, 4), max_size=3))
        stride = [data.draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12])) for _ in size]
        shown = Region(memory, torch.int16, tuple(size), tuple(stride), data.draw(st.integers(0, 60)))
        touch = Touch(*shown.span, shown, owner, data.draw(st.booleans()))
        # Plans refuse writes that repeat before they look for conflicts.
        touches.append(touch._replace(writes=touch.writes and not Extent.of(touch).repeats))
        places = itertools.product(
            *(range(0, n * step, step) if step else (0,) for n, step in zip(size, stride, strict=True))
        )
        bytes_of.append({shown.offset + 2 * sum(place) + byte for place in places for byte in (0, 1)})
    clashes = {
        (a, b)
        for a, b in itertools.combinations(range(len(touches)), 2)
        if bytes_of[a] & bytes_of[b] and (touches[a].writes or touches[b].writes)
    }
    found = find_conflict(touches)
    if found is None:
        assert not clashes
    else:
        assert tuple(sorted(found)) in clashes


def test_equal_rows_that_meet_further_down_conflict():
    target = torch.zeros(8, 8)
    with pytest.raises(CopyError, match="overlap"):
        cover(target[:6, :2], target[2:, :2]).check()
    cover(target[:6, :2], target[2:, 2:4]).check()


def test_a_wide_interleave_is_decided_row_by_row(monkeypatch):
    monkeypatch.setattr("hf_stream.copying.overlap._MAX_PIECES", 10)
    target = torch.zeros(100_000, 8)
    plan = cover(*(target[:, i] for i in range(8)))
    plan.check_complete([region(target)])
    with pytest.raises(CopyError, match="overlap"):
        cover(target[:, 0:2], target[:, 1:8]).check()


def test_a_plan_can_be_read(tmp_path):
    (tmp_path / "a").write_bytes(bytes(4000))
    with FileStorage(tmp_path / "a") as file:
        target = torch.zeros(1000)
        plan = Plan.of([Copy(Region.contiguous(file, torch.float32, (1000,)), region(target), name="x")])
        assert (plan.nbytes_read, plan.nbytes_written, len(plan)) == (4000, 4000, 1)
        assert plan.reads() == {str(tmp_path / "a"): 4000}
        assert plan.writes() == {"memory (cpu)": 4000}
        assert plan.peak_memory(1 << 20) == 0
        assert str(plan).splitlines() == [
            "1 copies, 4,000 bytes read, 4,000 bytes written",
            f"  read   4,000  {tmp_path / 'a'}",
            "  write  4,000  memory (cpu)",
        ]
        cast = Plan.of([Copy(Region.contiguous(file, torch.float16, (1000,)), region(target))])
        assert cast.peak_memory(1 << 20) == 1 << 20
