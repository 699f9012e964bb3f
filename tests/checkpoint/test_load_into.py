from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_bits, same_bits
from torch import nn

import hf_stream
from hf_stream import LazyTensor, load_into
from hf_stream.errors import CheckpointError


class Model(nn.Module):
    """Parameters, tied weights, persistent and other buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("temporary", torch.ones(3), persistent=False)


def _values(module: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, tensor in module.state_dict().items():
        values[name] = torch.randint(0, 100, tensor.shape, generator=generator).to(tensor.dtype)
    values["head.weight"] = values["embed.weight"]
    return values


@settings(deadline=None, max_examples=60)
@given(drop=st.sets(st.integers(0, 9)), extra=st.booleans(), lazy=st.booleans(), meta=st.booleans(), wide=st.booleans())
def test_the_same_as_torch_does(drop: set[int], extra: bool, lazy: bool, meta: bool, wide: bool) -> None:
    ours = Model()
    theirs = copy.deepcopy(ours)
    values = _values(ours)
    tied = {"embed.weight", "head.weight"}
    names = [name for n, name in enumerate(values) if n not in drop or name in tied]
    values = {name: values[name].double() if wide else values[name] for name in names}
    if extra:
        values["extra"] = torch.ones(2)
    plain = OrderedDict(values)
    plain._metadata = theirs.state_dict()._metadata  # without it a BatchNorm fills in what its old versions lacked
    wanted = theirs.load_state_dict(plain, strict=False)
    given = {name: LazyTensor.from_tensor(value) if lazy else value for name, value in values.items()}
    if meta:
        with torch.device("meta"):
            ours = Model()
    if wanted.missing_keys or wanted.unexpected_keys:
        with pytest.raises(CheckpointError, match="do not fit Model"):
            load_into(ours, given)
    result = load_into(ours, given, strict=False)
    assert result == wanted
    assert ours.head.weight is ours.embed.weight
    for name, tensor in ours.state_dict().items():
        if name in names:
            assert same_bits(tensor, theirs.state_dict()[name])
        else:
            assert tensor.is_meta == meta


def test_tensors_are_filled_where_they_are() -> None:
    module = Model()
    before = dict(module.named_parameters())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    load_into(module, _values(module))
    assert all(before[name] is parameter for name, parameter in module.named_parameters())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in module.parameters())
    assert optimizer.param_groups[0]["params"][0] is module.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_needed_under_one_name_only(name: str) -> None:
    module = Model()
    values = _values(module)
    for other in {"embed.weight", "head.weight"} - {name}:
        del values[other]
    assert load_into(module, values).missing_keys == []
    assert torch.equal(module.head.weight, values[name])
    del values[name]
    with pytest.raises(CheckpointError, match=r"'head\.weight' is missing"):
        load_into(module, values)


def test_of_two_values_of_a_tied_weight_the_last_counts_as_in_torch() -> None:
    ours, theirs = Model(), Model()
    values = {**_values(ours), "head.weight": torch.full((5, 4), 7.0)}
    theirs.load_state_dict(values)
    load_into(ours, values)
    assert torch.equal(ours.embed.weight, theirs.embed.weight)
    assert torch.equal(ours.embed.weight, values["head.weight"])


def test_parameters_that_are_views_of_one_memory() -> None:
    memory = torch.zeros(30)
    ours = nn.ParameterDict({"a": nn.Parameter(memory[:12].view(3, 4)), "b": nn.Parameter(memory[12:20].view(2, 4).T)})
    ours["again"] = nn.Parameter(memory[:12].view(3, 4))  # tied by memory, not by object
    values = {"a": random_bits((3, 4), torch.float32), "b": random_bits((4, 2), torch.float32)}
    load_into(ours, values)
    assert same_bits(ours["again"].data, values["a"])
    assert same_bits(ours["b"].data, values["b"])
    assert not memory[20:].any()


def test_nothing_moves_before_everything_fits(tmp_path: Path) -> None:
    module = Model()
    before = copy.deepcopy(module.state_dict())
    values = {**_values(module), "layers.1.running_mean": torch.ones(5), "layers.1.bias": torch.ones(())}
    for strict in (True, False):
        with pytest.raises(
            CheckpointError, match=r"2 tensors do not fit Model: 'layers.1.bias': .*\[4\], got \[\]; 'lay.*got \[5\]"
        ):
            load_into(module, values, strict=strict)
    assert all(same_bits(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_many_misfits_are_counted() -> None:
    with pytest.raises(CheckpointError, match=r"9 tensors do not fit Linear.* and 4 more\. Use a layout"):
        load_into(nn.Linear(2, 2), {str(n): torch.ones(1) for n in range(7)})


def test_meta_and_lazy_parameters_become_real_and_keep_what_was_set_on_them(tmp_path: Path) -> None:
    values = _values(Model())
    hf_stream.save_checkpoint(values, tmp_path)
    with torch.device("meta"):
        module = Model()
    module.embed.weight.mark = "kept"
    module.layers[0].bias.requires_grad_(False)
    module.layers[0].weight = nn.Parameter(LazyTensor.from_tensor(torch.zeros(4, 4)))
    module.layers[0].weight.mark = "too"
    load_into(module, hf_stream.open_checkpoint(tmp_path))
    assert not hf_stream.verify(module.state_dict(), values)
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.device.type == "cpu"
    assert module.head.weight is module.embed.weight
    assert (module.embed.weight.mark, module.layers[0].weight.mark) == ("kept", "too")
    assert not module.layers[0].bias.requires_grad
    assert "scale" in dict(module.named_buffers())
    assert module.temporary.is_meta


def test_a_meta_parameter_does_not_share_memory_with_what_was_given() -> None:
    value = torch.ones(2, 2)
    module = nn.Linear(2, 2, bias=False, device="meta")
    load_into(module, {"weight": value})
    value.zero_()
    assert torch.equal(module.weight, torch.ones(2, 2))


def test_autograd_notices_that_weights_have_changed() -> None:
    module = nn.Linear(2, 2, bias=False)
    loss = module(torch.ones(1, 2, requires_grad=True)).sum()
    load_into(module, {"weight": torch.ones(2, 2)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_values_that_require_grad_and_extra_state() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> str:
            return "not a tensor"

    module = WithExtra(2, 2, bias=False)
    load_into(module, {"weight": nn.Parameter(torch.ones(2, 2)) * 2})
    assert torch.equal(module.weight, torch.full((2, 2), 2.0))
    assert module.weight.grad_fn is None


def test_zero_sized_parameters_are_not_taken_for_tied() -> None:
    module = nn.ParameterDict({"a": nn.Parameter(torch.empty(0, 2)), "b": nn.Parameter(torch.empty(0, 2))})
    assert load_into(module, {"a": torch.empty(0, 2)}, strict=False).missing_keys == ["b"]
