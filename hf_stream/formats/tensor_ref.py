"""How the structure of a nested state says which tensor of the file, or which view of it, stands in a place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hf_stream.errors import FormatError
from hf_stream.formats.strict_json import Pairs

_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class View:
    """A strided window on a tensor's elements in row-major order, all in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One more than the number of the last element it shows, or 0 if it shows none."""
        if 0 in self.size:
            return 0
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of the file as the leaf of a nesting: "name", or {"name": ..., "parameter": true, ...}.

    Attributes:
        name: In the file.
        view: None for the whole tensor as it is.
        parameter: Whether the leaf is a `torch.nn.Parameter`.
        requires_grad: As torch has it.
    """

    name: str
    view: View | None = None
    parameter: bool = False
    requires_grad: bool = False

    def to_json(self) -> Any:
        """What stands under the leaf's tag."""
        more: dict[str, Any] = {}
        if self.view is not None:
            more |= {"size": list(self.view.size), "stride": list(self.view.stride), "offset": self.view.offset}
        if self.parameter:
            more["parameter"] = True
        if self.requires_grad:
            more["requires_grad"] = True
        return {"name": self.name, **more} if more else self.name

    @classmethod
    def parse(cls, content: Any) -> TensorRef:
        """The other way round, from `parse_json`.

        Raises:
            FormatError: It is something else.
        """
        if isinstance(content, str):
            return cls(content)
        if not isinstance(content, Pairs):
            raise FormatError("neither the name of a tensor nor an object")
        fields: dict[str, Any] = dict(content)
        if len(fields) < len(content):
            raise FormatError("a field is repeated")
        name = fields.pop("name", None)
        flags = [fields.pop(flag, False) for flag in ("parameter", "requires_grad")]
        if not isinstance(name, str) or not all(isinstance(flag, bool) for flag in flags):
            raise FormatError("'name' is not text, or a flag is not true or false")
        view = None
        if fields:
            size, stride, offset = (fields.pop(field, None) for field in ("size", "stride", "offset"))
            if fields:
                raise FormatError(f"unknown field {next(iter(fields))!r:.40}")
            whole = _are_whole(size) and _are_whole(stride) and _are_whole([offset])
            if not whole or len(size) != len(stride):
                raise FormatError("'size', 'stride' and 'offset' are not those of a view")
            view = View(tuple(size), tuple(stride), offset)
        return cls(name, view, *flags)


def _are_whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number <= _MAX for number in numbers)
