"""Layout: rules put together, composed, inverted, and run on a mapping or on a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import overload

import torch

from hf_stream.checkpoint.mapping import AnyLayout, bound
from hf_stream.checkpoint.matches import Matches
from hf_stream.errors import ArgumentTypeError
from hf_stream.layouts.arguments import checked_rules
from hf_stream.layouts.composable import Chain, Composable, as_prefix, is_layout
from hf_stream.layouts.found import Found
from hf_stream.layouts.naming import Rename
from hf_stream.layouts.rule import Rule, as_optional_as
from hf_stream.layouts.stage import Stage
from hf_stream.lazy import named_tensors
from hf_stream.lazy.given import kind


class Layout:
    """A change of names and shapes, written as rules.

        >>> import torch
        >>> pack = Layout([
        ...     Concat(["layers.{i}.q", "layers.{i}.k", "layers.{i}.v"], "layers.{i}.qkv"),
        ...     Transpose("head"),
        ... ])
        >>> separate = {name: torch.zeros(8, 4) for name in ("layers.0.q", "layers.0.k", "layers.0.v", "head", "norm")}
        >>> for name, tensor in pack(separate).items():
        ...     print(name, list(tensor.shape))
        layers.0.qkv [24, 4]
        head [4, 8]
        norm [8, 4]

    The tensors may be real, lazy or on the meta device: rules only reorder, join and cut, and never look at values.

    Each tensor is taken by the one rule that has a pattern for its name; a name that no rule has a pattern for passes
    through; a rule that finds no tensors does nothing, and is warned of unless it is `optional`. To change a tensor
    twice, let one layout follow another:

        >>> twice = Layout([Rename("norm", "ln")]) | Layout([Cast("ln", torch.float16)])

    Results stand where the first of their tensors stood; those made of one tensor, in the order of the rule.

    `layout.inverse` leads back, as long as no name that passed through looks like a result:

        >>> restored = pack.inverse(pack(separate))
        >>> restored.keys() == separate.keys()
        True

    A layout among the rules joins its own rules to the others; if it is itself a sequence (`a | b`), its first part
    joins the rules, its second part follows them, and so on.

    Args:
        rules: Rules and layouts.
    """

    __slots__ = ("_stages",)

    def __init__(self, rules: Iterable[Rule | Layout]) -> None:
        rules = checked_rules(rules, "Layout", Rule, Layout)
        parts: list[list[list[Rule]]] = [
            [list(stage) for stage in rule.stages] if isinstance(rule, Layout) else [[rule]] for rule in rules
        ]
        self._stages = tuple(
            Stage([rule for stage in side_by_side for rule in stage])
            for side_by_side in zip_longest(*parts, fillvalue=())
        )

    @property
    def stages(self) -> tuple[tuple[Rule, ...], ...]:
        """The rules; those of one stage work side by side, and the next stage takes their results."""
        return tuple(stage.rules for stage in self._stages)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in the new layout.

        Raises:
            LayoutError: two rules have a pattern for one name; two results have one name, or one has that of a tensor
                that passes through; of a group of tensors only some are there; shapes or dtypes do not fit.
        """
        layout = bound(self, tensors)
        assert isinstance(layout, Layout)
        results, matches = layout.with_matches(tensors)
        matches.report()
        return results

    def with_matches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Matches]:
        """The same without a warning, and what each rule has found."""
        tensors = named_tensors(tensors, "a layout")
        if self.needs_config:
            return self.with_config(None).with_matches(tensors)
        names, founds = list(tensors), [Found() for _ in self._stages]
        for stage, found in zip(self._stages, founds, strict=True):
            placed = sorted(stage.run(tensors.items(), found), key=itemgetter(0))
            tensors = {name: tensor for _, name, tensor in placed}
        return dict(tensors), self._matches(founds, names)

    @property
    def needs_config(self) -> bool:
        """Whether a model's config tells some of the sizes."""
        return any(stage.needs_config for stage in self._stages)

    def with_config(self, config: object) -> Layout:
        """The same layout with the sizes that a model's config tells, where it does not have them already.

        Args:
            config: The config, an object or a dict; None if there is none.

        Raises:
            LayoutError: Sizes cannot do without.
        """
        if not self.needs_config:
            return self
        return _of_stages(tuple(Stage([rule.with_config(config) for rule in stage.rules]) for stage in self._stages))

    def stream(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same for tensors that come one after the other.

        Each result is yielded as soon as its last tensor has come, and nothing is held but tensors that wait for
        others of their group. Errors that only the end can tell (an incomplete group) are raised at the end.

            >>> pairs = ((name, torch.zeros(2)) for name in ("b.0", "a.1", "a.0", "b.1"))
            >>> join = Layout([Concat(["{x}.0", "{x}.1"], "{x}")])
            >>> [(name, list(tensor.shape)) for name, tensor in join.stream(pairs)]
            [('a', [4]), ('b', [4])]
        """
        if isinstance(pairs, Mapping | str):
            raise ArgumentTypeError(f"Layout.stream takes pairs of names and tensors, got {kind(pairs)}; pass .items()")
        if self.needs_config:
            yield from self.with_config(None).stream(pairs)
            return
        founds = [Found() for _ in self._stages]
        for stage, found in zip(self._stages, founds, strict=True):
            pairs = map(itemgetter(1, 2), stage.run(pairs, found))
        yield from pairs
        self._matches(founds, founds[0].names if founds else []).report()

    def _matches(self, founds: Sequence[Found], names: Sequence[str]) -> Matches:
        pairs = zip(self._stages, founds, strict=True)
        return Matches.of((entry for stage, found in pairs for entry in found.matches(stage.rules)), names)

    @overload
    def __or__(self, other: Layout) -> Layout: ...

    @overload
    def __or__(self, other: AnyLayout) -> Layout | Composable: ...

    def __or__(self, other: AnyLayout) -> Layout | Composable:
        """This layout, then `other`, which may be a function: `(a | b)(x)` equals `b(a(x))`."""
        if isinstance(other, Layout):
            return _of_stages(self._stages + other._stages)
        return Chain.of([self, other]) if is_layout(other) else NotImplemented

    def __ror__(self, other: AnyLayout) -> Composable:
        """`other`, a function, then this layout."""
        return Chain.of([other, self]) if is_layout(other) else NotImplemented

    @property
    def inverse(self) -> Layout:
        """The layout that leads back.

        Raises:
            LayoutError: a rule cannot be inverted; says which.
        """
        return _of_stages(
            tuple(
                Stage([as_optional_as(rule.invert(), rule) for rule in stage.rules]) for stage in reversed(self._stages)
            )
        )

    def scoped(self, src_prefix: str, dst_prefix: str | None = None) -> Layout:
        """The same layout for a part of a bigger model: the names that begin with `src_prefix`.

            >>> pack = Layout([Concat(["q", "k"], "qk"), Rename("w", "weight")]).scoped("model.", "")
            >>> list(pack({"model.q": torch.ones(1), "model.k": torch.ones(1), "model.norm": torch.ones(1)}))
            ['qk', 'norm']

        Args:
            src_prefix: Stands before every name of the part; the dot at its end need not be written.
            dst_prefix: Stands there afterwards, before every name of the part, those that no rule touches included.
                Default: as before.
        """
        src_prefix = as_prefix(src_prefix)
        dst_prefix = None if dst_prefix is None else as_prefix(dst_prefix)
        stages = tuple(
            Stage([as_optional_as(rule.prefixed(src_prefix), rule) for rule in stage.rules]) for stage in self._stages
        )
        if dst_prefix is None or dst_prefix == src_prefix:
            return _of_stages(stages)
        moved = Rename(f"{src_prefix}{{rest:+}}", f"{dst_prefix}{{rest}}")
        return _of_stages((*stages, Stage([moved])))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(self.stages)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._stages)) or "Layout([])"


def _of_stages(stages: tuple[Stage, ...]) -> Layout:
    layout = Layout(())
    layout._stages = stages
    return layout
