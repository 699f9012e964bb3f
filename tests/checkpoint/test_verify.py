from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from samples import DTYPES, named_tensors, random_bits

from hf_stream import LazyTensor, verify


@settings(deadline=None)
@given(tensors=named_tensors(), buffer_size=st.integers(1, 500))
def test_equal_bits_are_equal(tensors, buffer_size: int) -> None:
    found = verify(tensors, {name: tensor.clone() for name, tensor in tensors.items()}, buffer_size=buffer_size)
    assert not found
    assert str(found) == "no difference"


@settings(deadline=None)
@given(st.data())
def test_the_first_flipped_bit_is_found_wherever_it_is(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    without = {torch.bool} if shape else {torch.bool, torch.float4_e2m1fn_x2}
    dtype = data.draw(st.sampled_from([d for d in DTYPES if d not in without]))
    a = random_bits(shape, dtype, 3)
    flat = a.clone().reshape(-1).view(torch.uint8)
    places = data.draw(st.sets(st.integers(0, len(flat) * 8 - 1), min_size=1, max_size=3))
    for place in places:
        flat[place // 8] ^= 1 << (place % 8)
    b = flat.view(dtype).reshape(shape)
    found = verify({"x": a, "y": a}, {"x": b, "y": a}, buffer_size=data.draw(st.integers(1, 300)))
    first = min(places) // 8 // dtype.itemsize
    expected = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), shape)) if shape else ()
    assert found.values["x"].index == expected
    assert list(found.values) == ["x"]
    assert str(found).count("\n") == 0


def test_zeros_signs_and_nans_payloads_count(tmp_path: Path) -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = verify({"z": torch.tensor([0.0, -0.0]), "n": nan}, {"z": torch.tensor([0.0, 0.0]), "n": nan[:1].repeat(2)})
    assert found.values["z"].index == (1,)
    assert (math.copysign(1, found.values["z"].a), math.copysign(1, found.values["z"].b)) == (-1, 1)
    assert found.values["n"].bits == ("7fc00001", "7fc00000")
    assert "'n' differs first at [1]: nan against nan (0x7fc00001 and 0x7fc00000)" in str(found)
    assert not verify({"n": nan}, {"n": nan.clone()})


def test_names_shapes_and_dtypes() -> None:
    a = {"only a": torch.ones(1), "shape": torch.ones(2, 3), "dtype": torch.ones(2), "both": torch.ones(2)}
    b = {
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(2).half(),
        "both": torch.ones(3).half(),
        "only b": torch.ones(1),
    }
    found = verify(a, b)
    assert (found.missing, found.extra) == (["only a"], ["only b"])
    assert found.shapes == {"shape": ((2, 3), (3, 2)), "both": ((2,), (3,))}
    assert found.dtypes == dict.fromkeys(("dtype", "both"), (torch.float32, torch.float16))
    assert not found.values
    assert len(str(found).splitlines()) == 6


def test_a_layout_is_applied_to_the_first() -> None:
    a = {"q": torch.randn(2, 3), "k": torch.randn(2, 3)}
    packed = {"qk": torch.cat([a["q"], a["k"]])}
    lazy = {name: LazyTensor.from_tensor(tensor) for name, tensor in a.items()}
    layout = lambda t: {"qk": torch.cat([t["q"], t["k"]])}  # noqa: E731
    assert not verify(lazy, packed, layout=layout)
    assert verify({**lazy, "q": lazy["k"]}, packed, layout=layout).values["qk"].index == (0, 0)


def test_paths_are_opened(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"a": torch.tensor([1.0, 1.0, 2.0])}, tmp_path / "b.safetensors")
    assert verify(tmp_path / "a.safetensors", str(tmp_path / "b.safetensors")).values["a"].index == (2,)


@pytest.mark.parametrize("side", [0, 1])
def test_a_deferred_operation_runs_once_however_small_the_buffer(side: int) -> None:
    runs = []

    real = torch.arange(1000.0)
    lazy = LazyTensor.from_tensor(real)
    original = torch.ops.aten.add.Tensor

    def counted(*args, **kwargs):
        runs.append(1)
        return original(*args, **kwargs)

    doubled = lazy + 1
    object.__setattr__(doubled._source.compute, "func", counted)
    sides = ({"x": doubled}, {"x": real + 1})
    assert not verify(sides[side], sides[1 - side], buffer_size=64)
    assert len(runs) == 1


@settings(deadline=None)
@given(numel=st.integers(1, 2000), buffer_size=st.integers(1, 5000))
def test_progress_counts_every_byte(numel: int, buffer_size: int) -> None:
    class Bar:
        n = 0

        def update(self, n: int) -> None:
            self.n += n

    assume(numel * 4 // buffer_size < 500)
    bar = Bar()
    verify({"x": torch.ones(numel)}, {"x": torch.ones(numel)}, buffer_size=buffer_size, progress=bar)
    assert bar.n == numel * 4
