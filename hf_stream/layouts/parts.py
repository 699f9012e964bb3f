"""Checkpoints in parts, with a piece of each large tensor in every file: pieces to whole tensors and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts.dispatch import Dispatcher
from hf_stream.layouts.pattern import compile_patterns
from hf_stream.layouts.rule import checked_dim, shape_text
from hf_stream.lazy import LazyTensor

_PART = re.compile(r"(?P<name>.+)\.part_(?P<number>0|[1-9][0-9]*)", re.DOTALL)
_WHOLE = -1
_LISTED = 3

Pieces = Sequence[torch.Tensor]
"""What the parts have under one name, in the order of the parts; the tensor itself where it is whole."""


@dataclass(frozen=True)
class PartRule:
    """How tensors are divided among the parts.

    Attributes:
        patterns: Patterns of their names.
        dim: The dimension along which they are cut. None: every part has the whole tensor, and the first counts.
        blocks: Number of equal blocks along `dim`, each of which is cut: 3 for a fused projection.
        dim_of: Where parts may be cut in another way than `dim`: tells the dimension from what all parts have, by name.
    """

    patterns: tuple[str, ...]
    dim: int | None
    blocks: int = 1
    dim_of: Callable[[Mapping[str, Pieces]], int | None] | None = None


class Parts:
    """How one family of models divides its checkpoints, and all names that it has.

        >>> import torch
        >>> family = Parts("toy", [PartRule(("up.weight",), 0), PartRule(("norm.weight",), None)], ["version"])
        >>> files = {f"{name}.part_{i}": torch.empty(4) for i in range(2) for name in ("up.weight", "norm.weight")}
        >>> {name: list(tensor.shape) for name, tensor in family.merge(files).items()}
        {'up.weight': [8], 'norm.weight': [4]}

    Args:
        family: What errors call the models.
        rules: One for each kind of tensor; a name that no rule has a pattern for is an error.
        dropped: Patterns of names that are left out.
    """

    def __init__(self, family: str, rules: Sequence[PartRule], dropped: Sequence[str] = ()) -> None:
        self.family = family
        known = [(text, rule) for rule in rules for text in rule.patterns] + [(text, None) for text in dropped]
        self._dispatcher = Dispatcher((compile_patterns([text])[0], rule) for text, rule in known)

    def merge(self, tensors: Mapping[str, torch.Tensor], count: int | None = None) -> dict[str, torch.Tensor]:
        """Whole tensors from `{name}.part_{i}`, or from `name` where they are whole.

        Args:
            tensors: The tensors of all parts; nothing is read.
            count: How many parts there must be, where tensors are in parts. Default: any number.

        Raises:
            LayoutError: A name is not known, a part lacks a tensor, pieces do not fit together, or parts are missing.
        """
        numbered = _by_number(tensors)
        rules = self._rules(numbered)
        found = 1 + max((number for group in numbered.values() for number in group), default=_WHOLE)
        if count is not None and found not in (0, count):
            raise LayoutError(f"{self.family}: {count} parts wanted, got {found}. Open all of them, or change parts=.")
        pieces = {name: tuple(group.values()) for name, group in numbered.items()}
        wholes = {}
        for name, rule in rules.items():
            group = numbered[name]
            dim = rule.dim if rule.dim_of is None else rule.dim_of(pieces)
            if dim is not None and _WHOLE not in group and len(group) < found:
                lost = next(number for number in range(found) if number not in group)
                raise LayoutError(f"'{name}' is missing in part {lost} of {found}. The parts do not belong together.")
            wholes[name] = _joined(name, group, dim, rule.blocks)
        return wholes

    def cut(self, tensors: Mapping[str, torch.Tensor], count: int | None = None) -> dict[str, torch.Tensor]:
        """What `merge` undoes: `{name}.part_{i}` for each part in turn; the tensors as they are without `count`.

        Raises:
            LayoutError: A name is not known, or a tensor cannot be cut into that many pieces.
        """
        rules = self._rules(tensors)
        if count is None:
            return {name: tensors[name] for name in rules}
        cuts = {name: _cut(name, tensors[name], rule, count) for name, rule in rules.items()}
        return {f"{name}.part_{i}": group[i] for i in range(count) for name, group in cuts.items()}

    def _rules(self, names: Mapping[str, object]) -> dict[str, PartRule]:
        """The rule of each name that is not left out."""
        rules = {}
        unknown = []
        for name in names:
            found = self._dispatcher.find(name)
            if not found:
                unknown.append(name)
            elif found[0][0] is not None:
                rules[name] = found[0][0]
        if unknown:
            raise self.unknown(unknown)
        return rules

    def unknown(self, names: Sequence[str], family: str | None = None) -> LayoutError:
        """The error about names that have no place in the family, or in another one."""
        listed = ", ".join(f"'{name}'" for name in names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
        return LayoutError(
            f"{listed}: no tensor of {family or self.family} has such a name. "
            "Check that the checkpoint is of this kind; a Drop in a layout before this one leaves tensors out."
        )


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors show the same bytes in the same way, as tied weights do."""
    if isinstance(a, LazyTensor) and isinstance(b, LazyTensor):
        return a.identity == b.identity
    if isinstance(a, LazyTensor) or isinstance(b, LazyTensor):
        return False
    return _window(a) == _window(b)


def _window(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _by_number(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[int, torch.Tensor]]:
    """What the parts have under each name, by the number of the part, in order."""
    numbered: dict[str, dict[int, torch.Tensor]] = {}
    for full_name, tensor in tensors.items():
        found = _PART.fullmatch(full_name)
        name, number = (found["name"], int(found["number"])) if found else (full_name, _WHOLE)
        numbered.setdefault(name, {})[number] = tensor
    for name, group in numbered.items():
        if _WHOLE in group and len(group) > 1:
            raise LayoutError(f"'{name}' is there whole and in parts. Take one of them out.")
    return {name: dict(sorted(group.items())) for name, group in numbered.items()}


def _joined(name: str, pieces: Mapping[int, torch.Tensor], dim: int | None, blocks: int) -> torch.Tensor:
    (number, first), *others = pieces.items()
    if not others:
        return first
    dim = dim if dim is None else _dim(name, first, dim)
    for other, piece in others:
        if piece.dtype != first.dtype:
            raise LayoutError(f"'{name}': {first.dtype} in part {number}, {piece.dtype} in part {other}. Cast one.")
        if _extents(piece, dim) != _extents(first, dim):
            alike = "must be equal" if dim is None else f"may differ in dimension {dim} only"
            shapes = f"{shape_text(first)} of part {number} and {shape_text(piece)} of part {other}"
            raise LayoutError(f"'{name}': shapes {shapes} {alike}. The parts do not belong together.")
    if dim is None:
        return first
    cut = [_blocks(name, piece, dim, blocks) for piece in pieces.values()]
    return torch.cat([block for same_block in zip(*cut, strict=True) for block in same_block], dim)


def _cut(name: str, tensor: torch.Tensor, rule: PartRule, count: int) -> Pieces:
    if rule.dim is None:
        return [tensor] * count
    dim = _dim(name, tensor, rule.dim)
    if tensor.shape[dim] % (rule.blocks * count):
        equal = f"{rule.blocks} times {count}" if rule.blocks > 1 else str(count)
        raise LayoutError(
            f"'{name}' of shape {shape_text(tensor)} cannot be cut into {equal} equal pieces along dimension {dim}. "
            "Change parts=."
        )
    pieces = [block.chunk(count, dim) for block in _blocks(name, tensor, dim, rule.blocks)]
    return [torch.cat(group, dim) if len(group) > 1 else group[0] for group in zip(*pieces, strict=True)]


def _blocks(name: str, tensor: torch.Tensor, dim: int, blocks: int) -> Pieces:
    if tensor.shape[dim] % blocks:
        raise LayoutError(
            f"'{name}' of shape {shape_text(tensor)} has no {blocks} equal blocks along dimension {dim}. "
            "Check that the checkpoint is of this kind."
        )
    return tensor.chunk(blocks, dim) if blocks > 1 else [tensor]


def _dim(name: str, tensor: torch.Tensor, dim: int) -> int:
    try:
        return checked_dim(tensor, dim)
    except LayoutError:
        raise LayoutError(
            f"'{name}' of shape {shape_text(tensor)} has no dimension {dim}. Check that the checkpoint is of this kind."
        ) from None


def _extents(tensor: torch.Tensor, but: int | None) -> list[int]:
    return [extent for dim, extent in enumerate(tensor.shape) if dim != but]
