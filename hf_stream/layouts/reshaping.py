"""Rules that change tensors one by one and keep their names: Transpose, Rearrange, Slice and Cast."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch

from hf_stream.errors import LayoutError
from hf_stream.formats.dtypes import CAST_TARGETS, as_dtype
from hf_stream.layouts.arguments import whole_number
from hf_stream.layouts.pattern import compile_patterns
from hf_stream.layouts.rule import Move, Named, Rule, checked_dim, shape_text, texts, word


@dataclass(frozen=True, repr=False)
class _EachRule(Rule):
    """A rule that changes each tensor by itself.

    Args:
        patterns: The pattern of the tensors' names, or several; each pattern stands for itself.
    """

    patterns: str | Sequence[str]

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        compiled = [compile_patterns([text]) for text in texts(self.patterns)]
        return tuple(Move(pattern, pattern, pattern[0].fields) for pattern in compiled)

    def run(self, group: Sequence[Named]) -> Sequence[torch.Tensor]:
        ((_, tensor),) = group
        return (self.change(tensor),)

    @abstractmethod
    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        """The changed tensor, made by functional operations."""

    def prefixed(self, prefix: str) -> Rule:
        return dataclasses.replace(self, patterns=[prefix + text for text in texts(self.patterns)])


@dataclass(frozen=True, repr=False)
class Transpose(_EachRule):
    """Exchange two dimensions; its own inverse.

        Transpose("{p:*}.mlp.c_fc.weight")
        # [I, O] -> [O, I]

    Args:
        patterns: Pattern of the tensors, or several patterns.
        dim0: One of the dimensions; negative counts from the back.
        dim1: The other.
    """

    dim0: int = 0
    dim1: int = 1

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        dim0, dim1 = (checked_dim(tensor, dim) for dim in (self.dim0, self.dim1))
        return torch.transpose(tensor, dim0, dim1)

    def invert(self) -> Transpose:
        return self


@dataclass(frozen=True, repr=False, init=False)
class Rearrange(_EachRule):
    """Reorder, split and merge dimensions as einops writes it. Needs the package einops.

        Rearrange("{p:*}.q.weight", "(heads half d) i -> (heads d half) i", heads=8, half=2)
        # [8 * 2 * d, i] -> [8 * d * 2, i]

    The inverse exchanges the sides of the arrow; it needs the sizes of the axes that it has to tell apart.

    Args:
        patterns: Pattern of the tensors, or several patterns.
        recipe: What `einops.rearrange` takes.
        optional: Whether nothing is wrong when there are no such tensors.
        axes: Sizes of the recipe's axes.
    """

    recipe: str
    axes: tuple[tuple[str, int], ...]

    def __init__(self, patterns: str | Sequence[str], recipe: str, /, *, optional: bool = False, **axes: int) -> None:
        _einops()
        object.__setattr__(self, "optional", optional)
        object.__setattr__(self, "patterns", patterns)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "axes", tuple(axes.items()))
        self.__post_init__()

    def settle(self) -> None:
        object.__setattr__(
            self, "axes", tuple((axis, whole_number(size, f"Rearrange: {axis}=")) for axis, size in self.axes)
        )
        if self.recipe.count("->") != 1:
            raise LayoutError(f"{self!r}: the recipe needs one arrow, as in 'out in -> in out'.")

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        einops = _einops()
        try:
            changed: torch.Tensor = einops.rearrange(tensor, self.recipe, **dict(self.axes))
        except einops.EinopsError as error:
            fact = str(error).strip().splitlines()[-1].strip()
            raise LayoutError(
                f"shape {shape_text(tensor)} does not fit '{self.recipe}': {fact} Change the recipe or its sizes."
            ) from error
        return changed

    def prefixed(self, prefix: str) -> Rearrange:
        patterns, axes = [prefix + text for text in texts(self.patterns)], dict(self.axes)
        return Rearrange(patterns, self.recipe, optional=self.optional, **axes)

    def invert(self) -> Rearrange:
        left, right = self.recipe.split("->")
        recipe, axes = f"{right.strip()} -> {left.strip()}", dict(self.axes)
        return Rearrange(self.patterns, recipe, optional=self.optional, **axes)

    def __repr__(self) -> str:
        axes = "".join(f", {axis}={size}" for axis, size in self.axes)
        optional = ", optional=True" if self.optional else ""
        return f"Rearrange({word(self.patterns)}, {self.recipe!r}{axes}{optional})"


@dataclass(frozen=True, repr=False)
class Slice(_EachRule):
    """Keep a range of a dimension. Cannot be inverted.

        Slice("model.embed_tokens.weight", 0, 0, 50257)
        # [50304, H] -> [50257, H]

    Args:
        patterns: Pattern of the tensors, or several patterns.
        dim: The dimension; negative counts from the back.
        start: The first index to keep; negative counts from the end.
        stop: The index after the last to keep; negative counts from the end, None is the end. A range that
            reaches beyond the tensor is an error.
    """

    dim: int
    start: int
    stop: int | None = None

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        dim = checked_dim(tensor, self.dim)
        extent = tensor.shape[dim]
        start, stop, _ = slice(self.start, self.stop).indices(extent)
        within = all(-extent <= bound <= extent for bound in (self.start, self.stop or 0))
        if not within or start >= stop:
            raise LayoutError(
                f"range {self.start}:{'' if self.stop is None else self.stop} of dimension {dim} does not exist "
                f"in shape {shape_text(tensor)}. Change start= or stop=."
            )
        return tensor.narrow(dim, start, stop - start)


@dataclass(frozen=True, repr=False)
class Cast(_EachRule):
    """Change the dtype of floating-point tensors; others keep theirs, as in `torch.nn.Module.to`.

        Cast("{name:+}", torch.bfloat16)

        Cast("{name:+}", torch.float32, inverse=torch.bfloat16)   # exact there and back: float32 holds each bfloat16

    What the dtype was before is not remembered: the inverse exists only when told.

    Args:
        patterns: Pattern of the tensors, or several patterns.
        dtype: The new dtype, floating-point, or its name, such as "bf16".
        inverse: The dtype to which the inverse casts. Default: there is no inverse.
    """

    dtype: torch.dtype | str
    inverse: torch.dtype | str | None = None

    def settle(self) -> None:
        for name in ("dtype", "inverse"):
            if getattr(self, name) is not None:
                dtype = as_dtype(getattr(self, name), f"Cast: {name}")
                if dtype not in CAST_TARGETS:
                    raise LayoutError(f"Cast is for floating-point dtypes, got {dtype}. Use Apply for others.")
                object.__setattr__(self, name, dtype)

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(as_dtype(self.dtype)) if tensor.is_floating_point() else tensor

    def invert(self) -> Cast:
        if self.inverse is None:
            raise LayoutError(f"{self!r} cannot be inverted: the dtype before is not known. Pass inverse=.")
        return Cast(self.patterns, self.inverse, self.dtype)


def _einops() -> ModuleType:
    """Einops, imported on first use: layouts without Rearrange do not need it."""
    try:
        import einops
    except ImportError as error:
        raise ImportError("Rearrange needs the package einops. Install it: pip install einops") from error
    return einops
