"""How SwiftTransformer divides a model for tensor parallelism: whole weights to partitions and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts.rule import shape_text

LAYER: Final = "decoder.layers.{}."
PARTITION: Final = re.compile(r"(?P<name>.+)\.tp_(?P<number>0|[1-9][0-9]*)", re.DOTALL)

# Along which dimension a weight is divided, once out_proj.weight has been transposed.
_DIMS: Final[Mapping[str, int]] = {
    "fc1.weight": 0,
    "fc1.bias": 0,
    "fc2.weight": 1,
    "fc3.weight": 0,
    "self_attn.out_proj.weight": 0,
}
_OUT: Final = "self_attn.out_proj.weight"
_QKV: Final = "self_attn.qkv_proj"
_SEPARATE: Final = tuple(f"self_attn.{x}_proj" for x in "qkv")


class Heads(NamedTuple):
    """Numbers of query heads and of key (equally value) heads, and rows of a head."""

    query: int
    key: int
    dim: int

    def shares(self, tp: int) -> list[tuple[int, int, int]]:
        """Query, key and value heads of each partition: what does not divide evenly falls to the last one."""
        query, key = _shares(self.query, tp), _shares(self.key, tp)
        return list(zip(query, key, key, strict=True))


def divide(weights: Mapping[str, torch.Tensor], tp: int, heads: Heads) -> dict[str, torch.Tensor]:
    """Partitions of whole weights.

    Args:
        weights: By SwiftTransformer's names, but for query, key and value, which stand apart as `self_attn.q_proj` and
            so on; nothing transposed. The numbers of heads suit them.
        tp: Number of partitions.
        heads: Of the model.

    Raises:
        LayoutError: A weight cannot be divided by `tp`.
    """
    results = {}
    for name, tensor in weights.items():
        layer, module, kind = _split_name(name)
        if module in _SEPARATE[1:]:
            continue
        pieces: Sequence[torch.Tensor]
        if module == _SEPARATE[0]:
            three = [weights[f"{layer}{separate}.{kind}"] for separate in _SEPARATE]
            pieces = _divide_qkv(three, heads, tp)
            name = f"{layer}{_QKV}.{kind}"
        elif (dim := _DIMS.get(f"{module}.{kind}")) is not None:
            pieces = _divide(name, tensor.t() if f"{module}.{kind}" == _OUT else tensor, dim, tp)
        else:
            results[name] = tensor
            continue
        results.update({f"{name}.tp_{i}": piece for i, piece in enumerate(pieces)})
    return results


def join(tensors: Mapping[str, torch.Tensor], tp: int) -> tuple[dict[str, torch.Tensor], Heads]:
    """What `divide` undoes: whole weights, and the numbers of heads that the shapes tell.

    Raises:
        LayoutError: Partitions are missing, or do not fit together.
    """
    groups: dict[str, dict[int, torch.Tensor]] = {}
    whole = {}
    for name, tensor in tensors.items():
        found = PARTITION.fullmatch(name)
        if found is None:
            whole[name] = tensor
        else:
            groups.setdefault(found["name"], {})[int(found["number"])] = tensor
    count = 1 + max((number for group in groups.values() for number in group), default=-1)
    if count not in (0, tp):
        raise LayoutError(f"the tensors are in {count} partitions, and swift_transformer({tp}) wants {tp}. Change tp.")
    pieces = {name: _in_order(name, group, tp) for name, group in groups.items()}
    heads = _heads_of(pieces)
    weights: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(found["name"] if (found := PARTITION.fullmatch(name)) else name for name in tensors):
        layer, module, kind = _split_name(name)
        if name in whole:
            if name in pieces:
                raise LayoutError(f"'{name}' is there whole and in partitions. Take one of them out.")
            weights[name] = whole[name]
        elif module == _QKV:
            three = _join_qkv(name, pieces[name], heads)
            weights |= {f"{layer}{separate}.{kind}": t for separate, t in zip(_SEPARATE, three, strict=True)}
        elif (dim := _DIMS.get(f"{module}.{kind}")) is not None:
            tensor = torch.cat(pieces[name], dim)
            weights[name] = tensor.t() if f"{module}.{kind}" == _OUT else tensor
        else:
            raise LayoutError(f"'{name}' is in partitions, as it never is in SwiftTransformer. Check the names.")
    return weights, heads


def _shares(number: int, tp: int) -> list[int]:
    return [number // tp] * (tp - 1) + [number - number // tp * (tp - 1)]


def _split_name(name: str) -> tuple[str, str, str]:
    """("decoder.layers.3.", "self_attn.q_proj", "bias"), of names of layers; ("", name, "") of others."""
    found = re.fullmatch(r"(decoder\.layers\.\d+\.)(.+)\.(weight|bias)", name, re.DOTALL)
    return (found[1], found[2], found[3]) if found else ("", name, "")


def _divide(name: str, tensor: torch.Tensor, dim: int, tp: int) -> Sequence[torch.Tensor]:
    if tensor.shape[dim] % tp:
        raise LayoutError(
            f"'{name}' of shape {shape_text(tensor)} cannot be cut into {tp} equal pieces along dimension {dim}. "
            "Choose another tp; SwiftTransformer itself has no place for such a model."
        )
    return tensor.chunk(tp, dim)


def _divide_qkv(three: Sequence[torch.Tensor], heads: Heads, tp: int) -> list[torch.Tensor]:
    """Query, key and value [heads * dim, hidden] or [heads * dim] to [hidden, heads, dim] or [heads, dim] each."""
    shares = heads.shares(tp)
    pieces = [
        tensor.split([share[which] * heads.dim for share in shares])  # type: ignore[no-untyped-call]
        for which, tensor in enumerate(three)
    ]
    rows = [torch.cat(group) for group in zip(*pieces, strict=True)]
    return [part.t().view(*part.shape[1:], sum(share), heads.dim) for part, share in zip(rows, shares, strict=True)]


def _join_qkv(name: str, pieces: Sequence[torch.Tensor], heads: Heads) -> list[torch.Tensor]:
    three: list[list[torch.Tensor]] = [[], [], []]
    for i, (piece, share) in enumerate(zip(pieces, heads.shares(len(pieces)), strict=True)):
        if piece.shape[-2:] != (sum(share), heads.dim):
            raise LayoutError(
                f"'{name}.tp_{i}' has shape {shape_text(piece)}; {sum(share)} heads of {heads.dim} wanted. "
                "The partitions do not belong together."
            )
        for stack, (start, stop) in zip(three, pairwise([0, *accumulate(share)]), strict=True):
            stack.append(piece.narrow(-2, start, stop - start).flatten(-2).t())
    return [torch.cat(stack) for stack in three]


def _in_order(name: str, group: Mapping[int, torch.Tensor], tp: int) -> list[torch.Tensor]:
    for number in range(tp):
        if number not in group:
            raise LayoutError(f"'{name}.tp_{number}' is missing: there are {tp} partitions. Get all files again.")
    return [group[number] for number in range(tp)]


def _heads_of(pieces: Mapping[str, Sequence[torch.Tensor]]) -> Heads:
    qkv, out = LAYER.format(0) + _QKV + ".weight", LAYER.format(0) + _OUT
    for name in (qkv, out):
        if name not in pieces:
            raise LayoutError(f"'{name}.tp_0' is missing. These are no partitions of SwiftTransformer, or not all.")
    shapes = [tuple(piece.shape) for piece in pieces[qkv]]
    if (
        {len(shape) for shape in shapes} != {3}
        or len({(shape[0], shape[2]) for shape in shapes}) > 1
        or not shapes[0][2]
    ):
        raise LayoutError(f"'{qkv}' has partitions of shapes {shapes}; [hidden, heads, head_dim] wanted.")
    total, dim = sum(shape[1] for shape in shapes), shapes[0][2]
    rows = sum(piece.shape[0] for piece in pieces[out])
    query = rows // dim
    if rows % dim or query >= total or (total - query) % 2:
        raise LayoutError(
            f"'{qkv}' has {total} heads of {dim} in all, and '{out}' {rows} rows: no numbers of heads fit these."
        )
    return Heads(query, (total - query) // 2, dim)
