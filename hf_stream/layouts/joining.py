"""Rules that join tensors and take them apart: Concat and Split along a dimension, Stack and Unstack over a number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts.from_config import FromConfig
from hf_stream.layouts.rule import (
    Move,
    Named,
    Rule,
    checked_dim,
    group_move,
    numbered_move,
    shape_text,
)

Value = TypeVar("Value")


@dataclass(frozen=True, repr=False)
class Concat(Rule):
    """Join the tensors of a group one after the other.

        Concat(["{p:*}.q.weight", "{p}.k.weight", "{p}.v.weight"], "{p}.qkv.weight")
        # [H, H], [H, H], [H, H] -> [3H, H]

        Concat(["{p:*}.q.weight", "{p}.k.weight", "{p}.v.weight"], "{p}.qkv.weight", sizes=(4, 1, 1))
        # [4K, H], [K, H], [K, H] -> [6K, H]

    With `groups`, each tensor is first cut into that many equal pieces, and the pieces are dealt in turn:

        Concat(["{p:*}.q.weight", "{p}.k.weight"], "{p}.qk.weight", groups=2)
        # q = q0 q1 [2D, H], k = k0 k1 [2D, H] -> q0 k0 q1 k1 [4D, H]

    The inverse is `Split` with the same `dim`, `sizes` and `groups`. It knows nothing about the tensors that went in,
    so tensors of unequal extent need `sizes`; joining them without is refused.

    Args:
        srcs: Patterns of the tensors, in the order in which they are joined.
        dst: Pattern of the result.
        dim: The dimension along which they are joined; negative counts from the back.
        sizes: The proportion of their extents, such as (4, 1, 1); the extents themselves are a proportion as well.
            Default: all equal.
        groups: Number of pieces that each tensor is cut into.
    """

    srcs: Sequence[str]
    dst: str
    dim: int = 0
    sizes: Sequence[int] | FromConfig | None = None
    groups: int = 1

    def settle(self) -> None:
        _check_several(self, self.srcs)
        _check_sizes(self, self.sizes, len(self.srcs), self.groups)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        return (group_move(self, self.srcs, [self.dst]),)

    def run(self, group: Sequence[Named]) -> Sequence[torch.Tensor]:
        tensors = [tensor for _, tensor in group]
        dim = checked_dim(tensors[0], self.dim)
        _check_alike(group, but=dim)
        extents = [tensor.shape[dim] for tensor in tensors]
        self._check_proportion(extents, dim)
        if self.groups == 1:
            return (torch.cat(tensors, dim),)
        pieces = [extent // self.groups for extent in extents]
        dealt = [
            tensor.narrow(dim, group * piece, piece)
            for group in range(self.groups)
            for tensor, piece in zip(tensors, pieces, strict=True)
        ]
        return (torch.cat(dealt, dim),)

    def _check_proportion(self, extents: list[int], dim: int) -> None:
        proportion = tuple(extent // (math.gcd(*extents) or 1) for extent in extents)
        wanted = _lowest(_told(self.sizes) or (1,) * len(extents))
        if proportion != wanted and any(extents):
            stated = "equal extents" if _told(self.sizes) is None else f"extents in the proportion {wanted}"
            raise LayoutError(
                f"{stated} wanted along dimension {dim}, got {', '.join(map(str, extents))}. "
                f"Pass sizes={proportion}, or the numbers of heads where a ready-made layout takes them."
            )
        if any(extent % self.groups for extent in extents):
            raise LayoutError(
                f"{self.groups} groups need extents divisible by {self.groups} along dimension {dim}, "
                f"got {', '.join(map(str, extents))}. Change groups=."
            )

    def prefixed(self, prefix: str) -> Concat:
        return dataclasses.replace(self, srcs=[prefix + src for src in self.srcs], dst=prefix + self.dst)

    def invert(self) -> Split:
        return Split(self.dst, self.srcs, self.dim, self.sizes, self.groups)


@dataclass(frozen=True, repr=False)
class Split(Rule):
    """Cut a tensor into several.

        Split("{p:*}.qkv.weight", ["{p}.q.weight", "{p}.k.weight", "{p}.v.weight"], sizes=(4, 1, 1))
        # [6K, H] -> [4K, H], [K, H], [K, H]

    The inverse is `Concat`, whose docstring explains `sizes` and `groups`.

    Args:
        src: Pattern of the tensor.
        dsts: Patterns of the pieces, in the order in which they stand in the tensor.
        dim: The dimension that is cut; negative counts from the back.
        sizes: The proportion of the pieces. Default: all equal.
        groups: Number of groups in which the pieces were dealt.
    """

    src: str
    dsts: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | FromConfig | None = None
    groups: int = 1

    def settle(self) -> None:
        _check_several(self, self.dsts)
        _check_sizes(self, self.sizes, len(self.dsts), self.groups)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        return (group_move(self, [self.src], self.dsts),)

    def run(self, group: Sequence[Named]) -> Sequence[torch.Tensor]:
        ((_, tensor),) = group
        dim = checked_dim(tensor, self.dim)
        proportion = _lowest(_told(self.sizes) or (1,) * len(self.dsts))
        parts = sum(proportion) * self.groups
        if tensor.shape[dim] % parts:
            remedy = "Change" if self.sizes is not None or self.groups > 1 else "Pass"
            raise LayoutError(
                f"split into {' + '.join(map(str, proportion))} parts{f' in {self.groups} groups' * (self.groups > 1)} "
                f"needs an extent divisible by {parts} along dimension {dim}, got shape {shape_text(tensor)}. "
                f"{remedy} sizes=."
            )
        pieces = [weight * (tensor.shape[dim] // parts) for weight in proportion]
        if self.groups == 1:
            return torch.split(tensor, pieces, dim)
        starts = [sum(pieces[:i]) for i in range(len(pieces))]
        return tuple(
            torch.cat([tensor.narrow(dim, g * sum(pieces) + start, piece) for g in range(self.groups)], dim)
            for start, piece in zip(starts, pieces, strict=True)
        )

    def prefixed(self, prefix: str) -> Split:
        return dataclasses.replace(self, src=prefix + self.src, dsts=[prefix + dst for dst in self.dsts])

    def invert(self) -> Concat:
        return Concat(self.dsts, self.src, self.dim, self.sizes, self.groups)


@dataclass(frozen=True, repr=False)
class Stack(Rule):
    """Join numbered tensors along a new dimension.

        Stack("{p:*}.experts.{expert}.up.weight", "{p}.experts.up")
        # E tensors [I, H], numbered 0 to E - 1 -> [E, I, H]

        Stack(["{p:*}.q.weight", "{p}.k.weight", "{p}.v.weight"], "{p}.qkv.weight")
        # [H, H], [H, H], [H, H] -> [3, H, H]

    Of one pattern, the placeholder that `dst` lacks is the number. Numbers must run from 0 without a hole. In a stream
    the result comes at the end, and the tensors wait until then, unless `count` says how many there are; without
    `count` it cannot be seen, either, that the last ones are missing.

    Args:
        src: Pattern of the tensors; or one for each, in their order.
        dst: Pattern of the result.
        dim: Where the new dimension stands in the result; negative counts from the back.
        count: How many tensors make one result.
    """

    src: str | Sequence[str]
    dst: str
    dim: int = 0
    count: int | FromConfig | None = None

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        if isinstance(self.src, str):
            return (numbered_move(self, self.src, self.dst, _told(self.count), gather=True),)
        _check_count(self, self.src, self.count)
        return (group_move(self, self.src, [self.dst]),)

    def run(self, group: Sequence[Named]) -> Sequence[torch.Tensor]:
        tensors = [tensor for _, tensor in group]
        dim = checked_dim(tensors[0], self.dim, extra=1)
        _check_alike(group)
        return (torch.stack(tensors, dim),)

    def prefixed(self, prefix: str) -> Stack:
        return dataclasses.replace(self, src=_prefixed(self.src, prefix), dst=prefix + self.dst)

    def invert(self) -> Unstack:
        return Unstack(self.dst, self.src, self.dim, self.count)


@dataclass(frozen=True, repr=False)
class Unstack(Rule):
    """Take a tensor apart along a dimension, which vanishes, into numbered ones.

        Unstack("{p:*}.experts.up", "{p}.experts.{expert}.up.weight")
        # [E, I, H] -> E tensors [I, H], numbered 0 to E - 1

        Unstack("{p:*}.qkv.weight", ["{p}.q.weight", "{p}.k.weight", "{p}.v.weight"])
        # [3, H, H] -> [H, H], [H, H], [H, H]

    Args:
        src: Pattern of the tensor.
        dst: Pattern of the results, in which the placeholder that `src` lacks is the number; or one for each.
        dim: The dimension that vanishes; negative counts from the back.
        count: The extent which that dimension must have. Default: any.
    """

    src: str
    dst: str | Sequence[str]
    dim: int = 0
    count: int | FromConfig | None = None

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        if isinstance(self.dst, str):
            return (numbered_move(self, self.dst, self.src, _told(self.count), gather=False),)
        _check_count(self, self.dst, self.count)
        return (group_move(self, [self.src], self.dst),)

    def run(self, group: Sequence[Named]) -> Sequence[torch.Tensor]:
        ((_, tensor),) = group
        dim = checked_dim(tensor, self.dim)
        extent = tensor.shape[dim]
        count = _told(self.count) if isinstance(self.dst, str) else len(self.dst)
        if extent != (count or extent or 1):
            wanted = count or "at least 1"
            raise LayoutError(
                f"extent {wanted} wanted along dimension {dim}, got shape {shape_text(tensor)}. Change dim= or count=."
            )
        return torch.unbind(tensor, dim)

    def prefixed(self, prefix: str) -> Unstack:
        return dataclasses.replace(self, src=prefix + self.src, dst=_prefixed(self.dst, prefix))

    def invert(self) -> Stack:
        return Stack(self.dst, self.src, self.dim, self.count)


def _check_several(rule: Rule, patterns: Sequence[str]) -> None:
    if isinstance(patterns, str):
        raise LayoutError(f"{type(rule).__name__} takes a list of patterns, got '{patterns}'. Put it in brackets.")


def _told(value: Value | FromConfig | None) -> Value | None:
    """A value that no config needs to tell."""
    return None if isinstance(value, FromConfig) else value


def _check_count(rule: Rule, patterns: Sequence[str], count: int | FromConfig | None) -> None:
    if _told(count) not in (None, len(patterns)):
        raise LayoutError(f"{rule!r}: {len(patterns)} patterns and count={count}. Leave count= out.")


def _prefixed(patterns: str | Sequence[str], prefix: str) -> str | list[str]:
    return prefix + patterns if isinstance(patterns, str) else [prefix + pattern for pattern in patterns]


def _check_sizes(rule: Rule, sizes: Sequence[int] | FromConfig | None, count: int, groups: int) -> None:
    if groups < 1:
        raise LayoutError(f"{type(rule).__name__}: groups must be at least 1, got {groups}.")
    sizes = _told(sizes)
    if sizes is not None and (len(sizes) != count or min(sizes) < 1):
        raise LayoutError(f"{type(rule).__name__}: {count} sizes of at least 1 wanted, got {list(sizes)}.")


def _lowest(sizes: Sequence[int]) -> tuple[int, ...]:
    """The same proportion in the lowest terms: (4096, 1024, 1024) -> (4, 1, 1)."""
    divisor = math.gcd(*sizes)
    return tuple(size // divisor for size in sizes)


def _check_alike(group: Sequence[Named], but: int | None = None) -> None:
    """Refuse what torch would refuse later without names, or cast silently.

    Args:
        group: The tensors to be joined.
        but: The dimension in which they may differ.
    """
    (first_name, first), *others = group
    for name, tensor in others:
        pair = f"'{first_name}' and '{name}'"
        if tensor.dtype != first.dtype:
            raise LayoutError(
                f"{pair} have dtypes {first.dtype} and {tensor.dtype}. Cast one of them in a layout before this one."
            )
        if _extents(tensor, but) != _extents(first, but):
            allowed = "must be equal" if but is None else f"may differ in dimension {but} only"
            raise LayoutError(f"shapes {shape_text(first)} and {shape_text(tensor)} of {pair} {allowed}.")


def _extents(tensor: torch.Tensor, but: int | None) -> list[int]:
    return [extent for dim, extent in enumerate(tensor.shape) if dim != but]
