"""What initialisers, tying and parametrised modules do to a parameter: on one that is not loaded it stays unread."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from programs import bits
from torch import nn

from hf_stream.copying.region import Region
from hf_stream.errors import LazyTensorError
from hf_stream.lazy import LazyTensor

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def stored(tmp_path: Path, counting_file) -> tuple[LazyTensor, torch.Tensor]:
    """X in a file, and how often each of its bytes has been read."""
    (tmp_path / "x").write_bytes(X.numpy().tobytes())
    file = counting_file(tmp_path / "x")
    return LazyTensor.from_region(Region.contiguous(file, X.dtype, X.shape)), file.read_counts


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.normal_(),
        lambda x: x.zero_(),
        lambda x: x.copy_(X),
        lambda x: x.data.uniform_(-1, 1),
        lambda x: nn.init.trunc_normal_(x),
        lambda x: nn.init.orthogonal_(x),
        lambda x: x[0].zero_(),
    ],
    ids=["normal_", "zero_", "copy_", "data.uniform_", "trunc_normal_", "orthogonal_", "row.zero_"],
)
def test_writing_into_a_parameter_that_is_not_loaded_is_refused_and_reads_nothing(stored, write):
    lazy, counts = stored
    with pytest.raises(LazyTensorError, match="would write into a LazyTensor"):
        write(nn.Parameter(lazy, requires_grad=False))
    assert not counts.any()


@pytest.mark.parametrize("like", [torch.zeros_like, torch.rand_like, torch.randn_like, torch.empty_like])
def test_new_tensors_like_it_draw_as_ever_and_read_nothing(stored, like):
    lazy, counts = stored
    torch.manual_seed(3)
    ours, after = like(lazy), torch.rand(2)
    torch.manual_seed(3)
    plain, after_plain = like(X), torch.rand(2)
    assert not isinstance(ours, LazyTensor)
    assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
    assert torch.equal(after, after_plain)
    assert like is torch.empty_like or torch.equal(ours, plain)
    assert not counts.any()


@pytest.mark.parametrize("padding", [(0, 0, 0, 3), (1, 0, 2, 0), (0, 0, -1, 2)])
def test_padded_embeddings_stay_lazy_and_read_that_one_tensor_once(stored, padding):
    lazy, counts = stored
    padded = nn.functional.pad(lazy, padding, value=2.0)
    assert isinstance(padded, LazyTensor)
    assert not counts.any()
    assert bits(padded.materialize()) == bits(nn.functional.pad(X, padding, value=2.0))
    assert (counts <= 1).all()


def test_a_weight_normed_layer_computes_its_weight_from_lazies_when_it_is_needed(stored):
    lazy, counts = stored
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    ours = copy.deepcopy(plain)
    plain.parametrizations.weight.original1.data = X.clone()
    ours.parametrizations.weight._parameters["original1"] = nn.Parameter(lazy)
    weight = ours.weight
    assert isinstance(weight, LazyTensor)
    assert not counts.any()
    assert bits(weight.materialize()) == bits(plain.weight)
    assert (counts == 1).all()


def test_assignment_to_data_replaces_what_a_parameter_shows(stored):
    lazy, counts = stored
    parameter = nn.Parameter(lazy)
    parameter.data = lazy.t()
    assert isinstance(parameter, LazyTensor)
    assert parameter.shape == (4, 6)
    assert not counts.any()
    assert torch.equal(parameter.materialize(), X.t())
    same = parameter
    parameter.data = torch.zeros(2)
    assert type(same) is nn.Parameter
    assert same.shape == (2,)
