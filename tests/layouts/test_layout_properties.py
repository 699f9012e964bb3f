"""Random layouts on random tensors: the inverse leads back, and every way to run a layout gives the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_stream.layouts import Apply, Cast, Concat, Layout, Rearrange, Rename, Rule, Split, Stack, Transpose, Unstack

Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """Rules, and names and tensors that fit them."""

    rules: list[Rule] = field(default_factory=list)
    tensors: Tensors = field(default_factory=dict)

    def add(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        start = 1000 * len(self.tensors)
        count = torch.Size(shape).numel()
        self.tensors[name] = (torch.arange(start, start + count) % 251).reshape(shape).to(dtype)


def flip_back(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor


KINDS = ["none", "rename", "concat", "split", "stack", "unstack", "transpose", "rearrange", "cast", "apply"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    case = Case()
    layers = range(draw(st.integers(1, 3)))
    small = st.integers(1, 3)
    for family in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(KINDS))
        head = draw(st.sampled_from(["m.{l}", "m.{l:int}", "{l:*}"])) + f".f{family}"
        tail = head.replace(":int", "").replace(":*", "")
        heads = [f"{'m.' * head.startswith('m')}{layer}.f{family}" for layer in layers]
        shape = draw(st.lists(small, min_size=2, max_size=3))
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        if kind in ("concat", "split"):
            sizes = tuple(draw(st.lists(small, min_size=1, max_size=3)))
            sizes = sizes if draw(st.booleans()) else (1,) * len(sizes)
            given_sizes = None if len(set(sizes)) == 1 else sizes
            groups = draw(small)
            parts = [f"{tail}.part{i}" for i in range(len(sizes))]
            shape[dim] = groups * draw(small)
            if kind == "concat":
                case.rules.append(Concat([head + ".part0", *parts[1:]], f"{tail}.whole", dim, given_sizes, groups))
                for name in heads:
                    for i, size in enumerate(sizes):
                        case.add(
                            f"{name}.part{i}",
                            *shape[: dim % len(shape)],
                            shape[dim] * size,
                            *shape[dim % len(shape) + 1 :],
                        )
            else:
                case.rules.append(Split(head, parts, dim, given_sizes, groups))
                shape[dim] *= sum(sizes)
                for name in heads:
                    case.add(name, *shape)
        elif kind == "stack":
            count = draw(st.integers(1, 12))
            case.rules.append(Stack(f"{head}.{{e}}.w", f"{tail}.w", dim, draw(st.sampled_from([None, count]))))
            for name in heads:
                for e in draw(st.permutations(range(count))):
                    case.add(f"{name}.{e}.w", *shape)
        else:
            dtype = torch.bfloat16 if kind == "cast" else torch.float32
            if kind == "rearrange":
                shape = [2 * shape[0], *shape[1:]]
            for name in heads:
                case.add(name, *shape, dtype=dtype)
            if kind == "rename":
                case.rules.append(Rename(head, f"renamed.{tail}.x"))
            elif kind == "unstack":
                case.rules.append(Unstack(head, f"{tail}.{{e}}", dim))
            elif kind == "transpose":
                case.rules.append(Transpose(head, dim, draw(st.integers(0, len(shape) - 1))))
            elif kind == "rearrange":
                case.rules.append(Rearrange(head, "(two a) b ... -> b (a two) ...", two=2))
            elif kind == "cast":
                case.rules.append(Cast(head, torch.float32, inverse=torch.bfloat16))
            elif kind == "apply":
                case.rules.append(Apply(head, f"{tail}.neg", torch.neg, flip_back))
    case.tensors = {name: case.tensors[name] for name in draw(st.permutations(list(case.tensors)))}
    return case


FOLLOWERS = st.sampled_from(
    [
        Layout([]),
        Layout([Rename("{rest:+}", "x.{rest}")]),
        Layout([Rename("m.{rest:+}", "n.{rest}"), Transpose("renamed.{rest:+}")]).scoped("", "top."),
    ]
)


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@settings(deadline=None, max_examples=150)
@given(cases())
def test_the_inverse_leads_back(case: Case) -> None:
    layout = Layout(case.rules)
    assert_same(layout.inverse(layout(case.tensors)), case.tensors)
    assert layout.inverse.inverse == layout


@settings(deadline=None, max_examples=100)
@given(cases(), FOLLOWERS, st.data())
def test_a_stream_in_any_order_gives_what_the_call_gives(case: Case, follower: Layout, data: st.DataObject) -> None:
    layout = Layout(case.rules) | follower
    wanted = layout(case.tensors)
    shuffled = data.draw(st.permutations(list(case.tensors.items())))
    pairs = list(layout.stream(iter(shuffled)))
    assert len(pairs) == len(dict(pairs))
    assert_same(dict(pairs), wanted)


@settings(deadline=None, max_examples=50)
@given(cases(), FOLLOWERS)
def test_a_composition_is_one_after_the_other(case: Case, follower: Layout) -> None:
    layout = Layout(case.rules)
    composed, in_turn = (layout | follower)(case.tensors), follower(layout(case.tensors))
    assert list(composed) == list(in_turn)
    assert_same(composed, in_turn)
    assert_same((layout | follower).inverse(composed), case.tensors)


@settings(deadline=None, max_examples=50)
@given(cases())
def test_meta_tensors_get_the_same_names_shapes_and_dtypes(case: Case) -> None:
    layout = Layout(case.rules)
    real = layout(case.tensors)
    meta = layout({name: tensor.to("meta") for name, tensor in case.tensors.items()})
    described = [[(name, t.shape, t.dtype) for name, t in tensors.items()] for tensors in (real, meta)]
    assert described[0] == described[1]
    assert all(tensor.is_meta for tensor in meta.values())
