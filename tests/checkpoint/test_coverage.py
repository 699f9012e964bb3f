from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_stream.checkpoint.coverage import Coverage, box_of
from hf_stream.errors import CheckpointError


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[object, ...]:
    """A basic index with step 1, ellipsis and negative numbers included."""
    index: list[object] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        edge = st.none() | st.integers(-size - 2, size + 2)
        if size and draw(st.booleans()):
            index.append(draw(st.integers(-size, size - 1)))
        else:
            index.append(slice(draw(edge), draw(edge)))
    if draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), ...)
    return tuple(index)


@given(st.data())
def test_a_gap_is_where_torch_sees_unwritten_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    written = torch.zeros(shape, dtype=torch.bool)
    coverage = Coverage(shape)
    for _ in range(data.draw(st.integers(0, 6))):
        index = data.draw(indices(shape))
        try:
            box = box_of("x", shape, index)
        except CheckpointError:
            # An ellipsis in the middle moves later entries to other dimensions, where they may not fit.
            with pytest.raises(IndexError):
                written[index]
            continue
        lost = data.draw(st.integers(0, 3)) == 0
        written[index] = not lost
        (coverage.lose if lost else coverage.add)(box)
    assert (coverage.gap is None) == bool(written.all())
    if coverage.gap is not None:
        part = written[tuple(slice(*span) for span in coverage.gap)]
        assert part.numel() == math.prod(stop - start for start, stop in coverage.gap) > 0
        assert not part.any()


@pytest.mark.parametrize(
    "index",
    [(slice(0, 4, 2),), (slice(None, None, -1),), (4,), (-5,), (0, 0, 0), (True,), (None,), ([0, 1],), (..., ...)],
)
def test_an_index_that_means_no_box_of_the_tensor_is_refused(index: tuple[object, ...]) -> None:
    with pytest.raises(CheckpointError, match="'x'"):
        box_of("x", (4, 2), index)
