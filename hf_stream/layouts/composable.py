"""What layouts that are not lists of rules have in common: they follow one another, and fit into bigger models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch

from hf_stream.checkpoint.mapping import FileFormat, check_files, config_after, file_format_of, map_tensors
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
    def inverse(self) -> Composable:
        """The layout that leads back.

        Raises:
            LayoutError: There is none.
        """
        raise LayoutError(f"{self!r} cannot be inverted: it loses what it takes away.")

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The content of config.json that goes with the new layout."""
        return config

    def __or__(self, other: TwoWay) -> Composable:
        """This layout, then `other`: `(a | b)(x)` equals `b(a(x))`."""
        return Chain.of([self, other]) if is_two_way(other) else NotImplemented

    def __ror__(self, other: TwoWay) -> Composable:
        """`other`, then this layout."""
        return Chain.of([other, self]) if is_two_way(other) else NotImplemented

    def scoped(self, src_prefix: str, dst_prefix: str | None = None) -> Composable:
        """The same layout for a part of a bigger model: the names that begin with `src_prefix`.

        Args:
            src_prefix: Stands before every name of the part; empty, or ends with a dot.
            dst_prefix: Stands there afterwards. Default: as before.
        """
        for prefix in (src_prefix, dst_prefix):
            if prefix and not prefix.endswith("."):
                raise LayoutError(f"prefix '{prefix}' must end with a dot. Write '{prefix}.'.")
        return Scoped(self, src_prefix, src_prefix if dst_prefix is None else dst_prefix)


def is_two_way(layout: object) -> TypeGuard[TwoWay]:
    """Whether something is a layout that has, or at least may be asked for, an inverse."""
    return callable(layout) and hasattr(type(layout), "inverse")


class Counting(Composable):
    """A layout that counts what it finds, in its `with_matches`."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results, matches = self.with_matches(named_tensors(tensors, "a layout"))
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
    def of(cls, layouts: Iterable[TwoWay]) -> Chain:
        """The chain of these, chains among them taken apart."""
        return cls(
            tuple(link for layout in layouts for link in (layout.links if isinstance(layout, Chain) else [layout]))
        )

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
    def inverse(self) -> Scoped:
        return Scoped(self.layout.inverse, self.dst_prefix, self.src_prefix)

    def __repr__(self) -> str:
        return f"({self.layout!r}).scoped('{self.src_prefix}', '{self.dst_prefix}')"
