"""Arguments that a model's config tells: what stands in their place until the config is known."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hf_stream.errors import LayoutError
from hf_stream.layouts.sizes import attention_heads, config_size, parts_with_heads

Described = TypeVar("Described")


class FromConfig(ABC):
    """The value of a field of a rule that is read from a config; equal to those that read the same."""

    @abstractmethod
    def arguments(self, config: object) -> Mapping[str, Any]:
        """What the config says, as arguments of the rule.

        Args:
            config: An object or a dict; None if there is none.

        Raises:
            LayoutError: The config lacks what it takes.
        """


def needs_config(described: Any) -> bool:
    """Whether some field of a dataclass stands for what a config tells."""
    return any(isinstance(getattr(described, entry.name), FromConfig) for entry in dataclasses.fields(described))


def with_config(described: Described, config: object) -> Described:
    """The same dataclass with what a config tells."""
    told: dict[str, Any] = {}
    for entry in dataclasses.fields(described):  # type: ignore[arg-type]
        value = getattr(described, entry.name)
        if isinstance(value, FromConfig):
            told.update(value.arguments(config))
    return dataclasses.replace(described, **told) if told else described  # type: ignore[type-var]


@dataclass(frozen=True)
class ExpertCount(FromConfig):
    """How many experts a mixture has: the `count` of a `Stack`; None where nobody tells."""

    def arguments(self, config: object) -> Mapping[str, Any]:
        return {"count": config_size(config, "num_experts", "num_local_experts", "n_routed_experts")}


@dataclass(frozen=True)
class QkvSizes(FromConfig):
    """How rows of query, key and value are dealt: the `sizes` and `groups` of a `Concat`.

    Attributes:
        style: See `packed_qkv`.
        num_heads: Overrides the config.
        num_key_value_heads: Overrides the config.
    """

    style: str
    num_heads: int | None = None
    num_key_value_heads: int | None = None

    def arguments(self, config: object) -> Mapping[str, Any]:
        """Proportion of q, k and v, and the number of groups in which they are dealt."""
        self._check_parts(config)
        heads = attention_heads(config, self.num_heads, self.num_key_value_heads)
        if heads is None:
            if self.style != "concat":
                raise LayoutError(
                    f"packed_qkv: style '{self.style}' needs the number of heads. Pass config or num_heads=."
                )
            return {"sizes": None, "groups": 1}
        num_heads, num_key_value_heads = heads
        if self.style == "per_head" and num_heads != num_key_value_heads:
            raise LayoutError(
                f"packed_qkv: style 'per_head' needs as many key heads as query heads, got {num_heads} query heads "
                f"and {num_key_value_heads} key heads. Use style='per_group'."
            )
        per_key_head = num_heads // num_key_value_heads
        return {"sizes": (per_key_head, 1, 1), "groups": 1 if self.style == "concat" else num_key_value_heads}

    def _check_parts(self, config: object) -> None:
        parts = parts_with_heads(config)
        if self.style != "concat" and self.num_heads is None and len(parts) > 1:
            # The same names in each of them, but other numbers of heads: rows would be dealt wrongly and still fit.
            raise LayoutError(
                f"packed_qkv: style '{self.style}' deals rows by heads, and the config has {len(parts)} parts with "
                f"heads: {', '.join(parts)}. Build a layout from each part's own config and put it in its place with "
                ".scoped()."
            )
