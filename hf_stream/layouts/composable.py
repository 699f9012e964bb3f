"""What layouts that are not lists of rules have in common: they follow one another, and fit into bigger models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch

from hf_stream.checkpoint.mapping import (
    AnyLayout,
    FileFormat,
    bound,
    check_files,
    config_after,
    file_format_of,
    layout_with_config,
    map_tensors,
)
from hf_stream.checkpoint.matches import Matches
from hf_stream.errors import LayoutError
from hf_stream.lazy import named_tensors


class TwoWay(Protocol):
    """A layout with a way back: a `Layout`, or a `Composable` one."""

    def __call__(self, tensors: Mapping[str, torch.Tensor], /) -> Mapping[str, torch.Tensor]: ...

    @property
    def inverse(self) -> TwoWay: ...


class Composable(ABC):
    """A layout written as code. It composes with others, and can be scoped, as a `Layout` can."""

    @abstractmethod
    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in the new layout."""

    def with_matches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Mapping[str, torch.Tensor], Matches]:
        """The same, and what was found; for layouts that count, and leave it to the caller to warn."""
        return self(tensors), Matches()

    @property
    def needs_config(self) -> bool:
        """Whether a model's config tells some of the sizes."""
        return False

    def with_config(self, config: object) -> Composable:
        """The same layout with the sizes that a model's config tells, where it does not have them already."""
        return self

    @property
    def inverse(self) -> Composable:
        """The layout that leads back.

        Raises:
            LayoutError: There is none.
        """
        raise LayoutError(f"{self!r} cannot be inverted: it loses what it takes away.")

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The content of config.json that goes with the new layout."""
        return config

    def __or__(self, other: AnyLayout) -> Composable:
        """This layout, then `other`, which may be a function: `(a | b)(x)` equals `b(a(x))`."""
        return Chain.of([self, other]) if is_layout(other) else NotImplemented

    def __ror__(self, other: AnyLayout) -> Composable:
        """`other`, then this layout."""
        return Chain.of([other, self]) if is_layout(other) else NotImplemented

    def scoped(self, src_prefix: str, dst_prefix: str | None = None) -> Composable:
        """The same layout for a part of a bigger model: the names that begin with `src_prefix`.

        Args:
            src_prefix: Stands before every name of the part; the dot at its end need not be written.
            dst_prefix: Stands there afterwards. Default: as before.
        """
        return Scoped(self, as_prefix(src_prefix), as_prefix(src_prefix if dst_prefix is None else dst_prefix))


def is_two_way(layout: object) -> TypeGuard[TwoWay]:
    """Whether something is a layout that has, or at least may be asked for, an inverse."""
    return callable(layout) and hasattr(type(layout), "inverse")


def is_layout(other: object) -> TypeGuard[AnyLayout]:
    """Whether something may follow a layout or be followed by one; a class may not, as in annotations."""
    return callable(other) and not isinstance(other, type)


def as_prefix(text: str) -> str:
    """What stands before every name of a part: empty, or with a dot at its end."""
    return text if not text or text.endswith(".") else f"{text}."


@dataclass(frozen=True, repr=False)
class Function(Composable):
    """A plain function as a layout, which has no inverse."""

    function: AnyLayout

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(self.function(tensors))

    @property
    def inverse(self) -> Composable:
        raise LayoutError(f"{self!r} is a function and has no inverse. Write it as a Layout of rules.")

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config_after(self.function, config)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", None) or repr(self.function)


class Counting(Composable):
    """A layout that counts what it finds, in its `with_matches`."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        layout = bound(self, tensors)
        assert isinstance(layout, Counting)
        results, matches = layout.with_matches(named_tensors(tensors, "a layout"))
        matches.report()
        return dict(results)

    @abstractmethod
    def with_matches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Mapping[str, torch.Tensor], Matches]:
        """The tensors in the new layout, and what was found."""


@dataclass(frozen=True, repr=False)
class Chain(Counting):
    """Layouts one after the other."""

    links: tuple[TwoWay, ...]

    @classmethod
    def of(cls, layouts: Iterable[AnyLayout]) -> Chain:
        """The chain of these, chains among them taken apart."""
        links: list[TwoWay] = []
        for layout in layouts:
            if isinstance(layout, Chain):
                links += layout.links
            else:
                links.append(layout if is_two_way(layout) else Function(layout))
        return cls(tuple(links))

    @property
    def needs_config(self) -> bool:
        return any(getattr(link, "needs_config", False) for link in self.links)

    def with_config(self, config: object) -> Chain:
        return Chain(tuple(layout_with_config(link, config) for link in self.links))

    def with_matches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Mapping[str, torch.Tensor], Matches]:
        matches = Matches()
        for link in self.links:
            tensors, found = map_tensors(link, tensors)
            matches = matches.then(found)
        return tensors, matches

    @property
    def inverse(self) -> Chain:
        return Chain(tuple(link.inverse for link in reversed(self.links)))

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        for link in self.links:
            config = config_after(link, config)
        return config

    @property
    def file_format(self) -> FileFormat:
        """That of the last layout."""
        return file_format_of(self.links[-1])

    def check_files(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the last layout look at what is to be written."""
        check_files(self.links[-1], tensors)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.links))


@dataclass(frozen=True, repr=False)
class Scoped(Counting):
    """A layout on the names that begin with a prefix; the others pass through."""

    layout: Composable
    src_prefix: str
    dst_prefix: str

    def with_matches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Mapping[str, torch.Tensor], Matches]:
        part = {
            name.removeprefix(self.src_prefix): t for name, t in tensors.items() if name.startswith(self.src_prefix)
        }
        results = {name: t for name, t in tensors.items() if not name.startswith(self.src_prefix)}
        inside, matches = map_tensors(self.layout, part)
        for name, tensor in inside.items():
            name = self.dst_prefix + name
            if name in results:
                raise LayoutError(f"'{name}' comes out twice: {self!r} makes it, and it passes through unchanged.")
            results[name] = tensor
        return results, matches if part else Matches.of(matches.rules, tensors)

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.layout.new_config(config)

    @property
    def needs_config(self) -> bool:
        return self.layout.needs_config

    def with_config(self, config: object) -> Scoped:
        return Scoped(self.layout.with_config(config), self.src_prefix, self.dst_prefix)

    @property
    def inverse(self) -> Scoped:
        return Scoped(self.layout.inverse, self.dst_prefix, self.src_prefix)

    def __repr__(self) -> str:
        return f"({self.layout!r}).scoped('{self.src_prefix}', '{self.dst_prefix}')"
