"""The functions of Python and torch that a pickle of tensors may call, and that make no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch

from hf_stream.errors import FormatError
from hf_stream.formats.key_table import check_collisions, check_key
from hf_stream.formats.pickle_objects import CALL, Function
from hf_stream.formats.pickle_reader import brief

_MAX: Final = 2**63 - 1


def functions(
    module: str, nbytes: int = CALL, counts: bool = False, **calls: Callable[..., Any]
) -> dict[tuple[str, str], Any]:
    """Functions of one module, by module and name."""
    return {(module, name): Function(f"{module}.{name}", call, nbytes, counts) for name, call in calls.items()}


def is_whole(number: Any) -> bool:
    """Whether it is a number of 63 bits, and no bool."""
    return type(number) is int and 0 <= number <= _MAX


def whole_numbers(numbers: Any, most: int = _MAX) -> tuple[int, ...] | None:
    """A row of at most so many of these as a tuple; None for anything else."""
    if type(numbers) not in (tuple, list, torch.Size) or len(numbers) > most or not all(map(is_whole, numbers)):
        return None
    return tuple(numbers)


def _ordered_dict(kind: Callable[[], dict[Any, Any]]) -> Callable[..., Any]:
    def call(spend: Callable[[int], None], pairs: Any = ()) -> Any:
        made = kind()
        items = pairs.items() if type(pairs) is dict else pairs
        if kind is Counter and type(pairs) is not dict and pairs != ():
            # It would count the pairs.
            raise FormatError("a Counter made of something else than a dict")
        if type(items) not in (list, tuple, type({}.items())):
            raise FormatError("a dict made of something else than pairs")
        for pair in items:
            if type(pair) not in (list, tuple) or len(pair) != 2:
                raise FormatError("a dict made of something else than pairs")
            check_key(pair[0], spend)
        check_collisions(key for key, _ in items)
        for key, value in items:
            made[key] = value
        return made

    return call


def _set(spend: Callable[[int], None], items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple, set):
        raise FormatError("a set made of something else than a list")
    for item in items:
        check_key(item, spend)
    check_collisions(items)
    return set(items)


def _bytes(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise FormatError("bytes in an encoding that torch.save does not use")
    return text.encode("latin-1")


def _bytearray(content: Any = b"", encoding: Any = None) -> bytearray:
    # Not a number: so many zeros are made of it.
    if type(content) is bytes and encoding is None:
        return bytearray(content)
    return bytearray(_bytes(content, encoding))


def _complex(real: Any, imaginary: Any = 0.0) -> complex:
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        raise FormatError("a complex number made of something else than two numbers")
    return complex(real, imaginary)


def _size(sizes: Any = ()) -> torch.Size:
    numbers = whole_numbers(sizes)
    if numbers is None:
        raise FormatError(f"{brief(sizes)} is not a size")
    return torch.Size(numbers)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or (index is not None and (not is_whole(index) or index > 127)):
        raise FormatError(f"{brief(kind)} is not a device")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError:
        raise FormatError(f"{brief(kind)} is not a device") from None


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in _LAYOUTS:
        raise FormatError(f"{brief(name)} is not a layout of tensors")
    return _LAYOUTS[name]


_LAYOUTS: Final = {
    str(layout): layout
    for layout in (
        torch.strided,
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    )
}

FUNCTIONS: Final = {
    **functions("collections", counts=True, OrderedDict=_ordered_dict(OrderedDict), Counter=_ordered_dict(Counter)),
    **functions("builtins", counts=True, set=_set),
    **functions("builtins", bytearray=_bytearray, complex=_complex),
    **functions("_codecs", encode=_bytes),
    **functions("torch", Size=_size, device=_device),
    **functions("torch.serialization", _get_layout=_layout),
}
