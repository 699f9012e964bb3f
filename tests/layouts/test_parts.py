from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from part_files import lazy, real
from samples import same_bits

from hf_stream.errors import LayoutError
from hf_stream.layouts.parts import PartRule, Parts, Pieces, same_memory
from hf_stream.lazy import LazyTensor, reads, working_set

TOY = Parts(
    "a toy",
    [
        PartRule(("rows.{i}",), 0),
        PartRule(("columns.{i}",), 1),
        PartRule(("fused.{i}",), 0, blocks=3),
        PartRule(("norm",), None),
    ],
    dropped=["version"],
)


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.sampled_from(["rows", "columns", "fused"]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_cut_and_merge_undo_each_other_and_move_each_byte_once(
    count: int, kinds: list[str], rows: int, columns: int
) -> None:
    shape = (3 * rows * count, columns * count)
    wholes = {f"{kind}.{i}": torch.randn(shape) for i, kind in enumerate(kinds)} | {"norm": torch.randn(3)}
    parts = TOY.cut(lazy(wholes), count)
    assert working_set(parts.values()) == 0
    for name, tensor in wholes.items():
        pieces = [parts[f"{name}.part_{i}"].materialize() for i in range(count)]
        if name.startswith("fused"):
            joined = torch.cat([piece.unflatten(0, (3, rows)) for piece in pieces], 1).flatten(0, 1)
        elif name == "norm":
            joined = pieces[-1]
        else:
            joined = torch.cat(pieces, int(name.startswith("columns")))
        assert same_bits(joined, tensor)
    merged = TOY.merge(lazy(real(parts)))
    assert working_set(merged.values()) == 0
    assert sum(region.nbytes for region in reads(merged.values())) == sum(t.nbytes for t in wholes.values())
    assert list(merged) == list(wholes)
    assert all(same_bits(merged[name].materialize(), tensor) for name, tensor in wholes.items())


def test_numbers_of_parts_are_numbers() -> None:
    parts = {f"rows.0.part_{i}": torch.full((1, 1), float(i)) for i in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)}
    assert TOY.merge(parts)["rows.0"].flatten().tolist() == list(range(12))


def test_whole_tensors_stay_what_they_are_and_a_single_part_counts_as_whole() -> None:
    tensors = {"rows.0": torch.ones(2, 2), "columns.1.part_0": torch.ones(2, 2), "version": torch.ones(1)}
    merged = TOY.merge(tensors)
    assert list(merged) == ["rows.0", "columns.1"]
    assert merged["rows.0"] is tensors["rows.0"]
    assert merged["columns.1"] is tensors["columns.1.part_0"]
    assert TOY.merge({}) == {}
    assert TOY.cut({"norm": tensors["rows.0"]}) == {"norm": tensors["rows.0"]}


def test_of_what_every_part_has_the_first_counts_wherever_it_is() -> None:
    later = torch.ones(3)
    assert TOY.merge({"norm.part_0": later, "norm.part_1": torch.zeros(3)})["norm"] is later
    assert TOY.merge({"rows.0.part_0": later, "rows.0.part_1": later, "norm.part_1": later})["norm"] is later


def test_parts_may_be_cut_otherwise_where_the_tensors_tell() -> None:
    def dim_of(pieces: dict[str, Pieces]) -> int:
        return int(pieces["norm"][0].shape[0] == 2)

    family = Parts("toy", [PartRule(("w",), 0, dim_of=dim_of), PartRule(("norm",), None)])
    for dim in (0, 1):
        parts = {f"w.part_{i}": torch.ones(1, 1) for i in range(2)} | {"norm": torch.ones(1 + dim)}
        assert family.merge(parts)["w"].shape == ((2, 1) if dim == 0 else (1, 2))


W = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"rows.0": W, "row.0": W, "x": W}, "'row.0', 'x': no tensor of a toy has such a name"),
        ({"a": W, "b": W, "c": W, "d": W}, "'a', 'b', 'c', ...: no tensor"),
        ({"rows.0.part_00": W}, "'rows.0.part_00': no tensor of a toy"),
        ({"rows.0": W, "rows.0.part_1": W}, "'rows.0' is there whole and in parts"),
        ({"rows.0.part_0": W, "rows.0.part_2": W}, "'rows.0' is missing in part 1 of 3"),
        ({"rows.0.part_0": W, "norm.part_1": W}, "'rows.0' is missing in part 1 of 2"),
        ({"rows.0.part_0": W, "rows.0.part_1": W[:, :1]}, "shapes [2, 2] of part 0 and [2, 1] of part 1 may differ in"),
        ({"norm.part_0": W, "norm.part_1": W[:1]}, "shapes [2, 2] of part 0 and [1, 2] of part 1 must be equal"),
        ({"rows.0.part_0": W, "rows.0.part_1": W.double()}, "torch.float32 in part 0, torch.float64 in part 1"),
        ({"columns.0.part_0": W[0], "columns.0.part_1": W[0]}, "'columns.0' of shape [2] has no dimension 1"),
        (
            {"fused.0.part_0": W, "fused.0.part_1": W},
            "'fused.0' of shape [2, 2] has no 3 equal blocks along dimension 0",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        TOY.merge(tensors)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"rows.0": W}, "'rows.0' of shape [2, 2] cannot be cut into 3 equal pieces along dimension 0. Change parts="),
        ({"fused.0": torch.ones(3, 2)}, "'fused.0' of shape [3, 2] cannot be cut into 3 times 3 equal pieces"),
        ({"columns.0": W[0]}, "'columns.0' of shape [2] has no dimension 1"),
        ({"rows.0.part_0": W}, "'rows.0.part_0': no tensor of a toy"),
    ],
)
def test_tensors_that_cannot_be_cut_are_refused(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        TOY.cut(tensors, 3)


def test_a_number_of_parts_that_was_not_expected_is_refused() -> None:
    parts = TOY.cut({"rows.0": torch.ones(4, 1)}, 4)
    assert TOY.merge(parts, 4).keys() == {"rows.0"}
    with pytest.raises(LayoutError, match="a toy: 8 parts wanted, got 4"):
        TOY.merge(parts, 8)
    assert TOY.merge({"rows.0": W}, 8)["rows.0"] is W


def test_tied_tensors_are_known_by_their_memory() -> None:
    memory = torch.arange(8.0)
    a, b = memory[:4].view(2, 2), memory[:4].view(2, 2)
    assert same_memory(a, b)
    assert same_memory(LazyTensor.from_tensor(a), LazyTensor.from_tensor(a))
    for other in (a.t(), memory[4:].view(2, 2), a.clone(), a.flatten(), a.view(torch.int32)):
        assert not same_memory(a, other)
        assert not same_memory(LazyTensor.from_tensor(a), LazyTensor.from_tensor(other))
    assert not same_memory(a, LazyTensor.from_tensor(a))
