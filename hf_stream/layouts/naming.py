"""Rules about whole tensors: rename one, drop some, or hand a group to any function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_stream.errors import HfStreamError, LayoutError
from hf_stream.layouts.pattern import compile_patterns
from hf_stream.layouts.rule import Move, Named, Rule, group_move, shape_text, texts
from hf_stream.lazy import planned
from hf_stream.lazy.given import kind


@dataclass(frozen=True, repr=False)
class Rename(Rule):
    """Give a tensor another name.

        Rename("bert.{rest:+}", "{rest}")
        # bert.pooler.dense.weight [H, H] -> pooler.dense.weight [H, H]

    Args:
        src: Pattern of the old name.
        dst: Pattern of the new name, with the same placeholders.
    """

    src: str
    dst: str

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        return (group_move(self, [self.src], [self.dst]),)

    def prefixed(self, prefix: str) -> Rename:
        return Rename(prefix + self.src, prefix + self.dst)

    def invert(self) -> Rename:
        return Rename(self.dst, self.src)


@dataclass(frozen=True, init=False, repr=False)
class Drop(Rule):
    """Leave tensors out. Cannot be inverted.

        Drop("{prefix:*}.rotary_emb.inv_freq", "{prefix:*}.attn.bias")

    Args:
        patterns: Patterns of the names to leave out.
        optional: Whether nothing is wrong when there are none.
    """

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str, optional: bool = False) -> None:
        object.__setattr__(self, "patterns", patterns)
        object.__setattr__(self, "optional", optional)
        self.__post_init__()

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        compiled = [compile_patterns([text])[0] for text in self.patterns]
        return tuple(Move((pattern,), (), pattern.fields) for pattern in compiled)

    def prefixed(self, prefix: str) -> Drop:
        return Drop(*(prefix + pattern for pattern in self.patterns))

    def __repr__(self) -> str:
        words = [*map(repr, self.patterns), *(["optional=True"] if self.optional else [])]
        return f"Drop({', '.join(words)})"


@dataclass(frozen=True, repr=False)
class Apply(Rule):
    """Hand a group of tensors to a function of yours.

        Apply("{p:*}.norm.weight", "{p}.norm.weight", lambda w: w + 1, inverse=lambda w: w - 1)
        # model.norm.weight [H] -> model.norm.weight [H]

        Apply(["{p:*}.w", "{p}.scale"], "{p}.w", lambda w, scale: w * scale)
        # model.up.w [O, I], model.up.scale [O, 1] -> model.up.w [O, I]

    Args:
        srcs: Patterns of the tensors that make one group, or a single one.
        dsts: Patterns of the results, or a single one; the same placeholders as `srcs`.
        fn: Takes the tensors of a group in the order of `srcs`, and returns one tensor, or a sequence of as many as
            there are `dsts`. It must not write into its arguments; tensors that it makes, it may fill as it likes.
            Nothing is computed before a result is needed, unless it asks for values, which is said in a warning.
        inverse: The same in the other direction; without it the rule cannot be inverted.
    """

    srcs: str | Sequence[str]
    dsts: str | Sequence[str]
    fn: Callable[..., torch.Tensor | Sequence[torch.Tensor]]
    inverse: Callable[..., torch.Tensor | Sequence[torch.Tensor]] | None = None

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        return (group_move(self, texts(self.srcs), texts(self.dsts)),)

    def run(self, group: Sequence[Named]) -> Sequence[torch.Tensor]:
        tensors = [tensor for _, tensor in group]
        try:
            result = planned(self.fn, *tensors)
        except HfStreamError:
            raise
        except Exception as error:
            shapes = ", ".join(map(shape_text, tensors))
            raise LayoutError(f"the function failed on {shapes}: {error or type(error).__name__}.") from error
        results = tuple(result) if isinstance(result, list | tuple) else (result,)
        wanted = len(texts(self.dsts))
        if wrong := [result for result in results if not isinstance(result, torch.Tensor)]:
            raise LayoutError(f"the function must return a tensor, or a list of tensors, got {kind(wrong[0])}.")
        if len(results) != wanted:
            raise LayoutError(
                f"the function must return as many tensors as dsts has names, {wanted}, got {len(results)}."
            )
        return results

    def prefixed(self, prefix: str) -> Apply:
        srcs, dsts = ([prefix + text for text in texts(side)] for side in (self.srcs, self.dsts))
        return dataclasses.replace(self, srcs=srcs, dsts=dsts)

    def invert(self) -> Apply:
        if self.inverse is None:
            raise LayoutError(f"{self!r} cannot be inverted: it has no inverse function. Pass inverse=.")
        return Apply(self.dsts, self.srcs, self.inverse, self.fn)
