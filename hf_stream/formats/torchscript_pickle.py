"""The tensors that a TorchScript archive keeps as attributes, read from its pickle alone and not from its code."""

from __future__ import annotations

from typing import Any, Final

from hf_stream.errors import FormatError
from hf_stream.formats.budget import Budget
from hf_stream.formats.pickle_objects import Function, Inert, InertClass
from hf_stream.formats.pickle_reader import brief, read_pickle
from hf_stream.formats.torch_pickle import Refused, StorageRecord, TensorRecord, TorchPickle, find_name

_CLASSES: Final = "__torch__"
_CHARACTER: Final = 4  # bytes of memory, at most
_NAMED: Final = (TensorRecord, Refused)


def read_torchscript_pickle(data: bytes, name: str, budget: Budget) -> tuple[Any, dict[str, StorageRecord]]:
    """What data.pkl holds, with `Inert` objects for those of the archive's classes, and its storages.

    Raises:
        FormatError: The pickle is damaged, or holds more than TorchScript writes.
    """
    reader = TorchPickle(budget)
    value, stop = read_pickle(data, _find_name, reader.storage, name, budget)
    if stop != len(data):
        raise FormatError(f"'{name}' has {len(data) - stop} bytes after its end. Get the file again.")
    return value, reader.storages


def attributes_of(module: Any, name: str, budget: Budget) -> dict[str, TensorRecord | Refused]:
    """The tensors of a module and of those in it, named as `state_dict` names them.

    Attributes that are no tensors are left out.

    Raises:
        FormatError: It is no module, two attributes come to one name, or modules are nested so that the names would be
            much larger than the file.
    """
    if type(module) is not Inert:
        raise FormatError(f"'{name}' holds {brief(module)}, not a TorchScript module")
    found: dict[str, TensorRecord | Refused] = {}
    todo, seen = [("", module)], set()
    while todo:
        prefix, owner = todo.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        state = owner.given[-1]
        if type(state) is not dict or any(type(key) is not str for key in state):
            raise FormatError(
                f"'{name}': '{prefix or owner.name}' keeps its state in a way of its own, made by its code"
            )
        inner = []
        for key, value in state.items():
            if type(value) in _NAMED:
                _spend_name(budget, name, len(prefix) + len(key))
                if prefix + key in found:
                    raise FormatError(f"'{name}' has two tensors '{prefix + key}'")
                found[prefix + key] = value
            elif type(value) is Inert:
                _spend_name(budget, name, len(prefix) + len(key))
                inner.append((f"{prefix}{key}.", value))
        todo.extend(reversed(inner))
    return found


def _spend_name(budget: Budget, name: str, length: int) -> None:
    try:
        budget.spend(_CHARACTER * length)
    except FormatError as error:
        raise FormatError(f"'{name}': {error}") from None


def _find_name(module: str, name: str) -> Any:
    if module == _CLASSES or module.startswith(_CLASSES + "."):
        return InertClass(f"{module}.{name}")
    return _NAMES.get((module, name)) or find_name(module, name)


def _typed_list(items: Any) -> list[Any]:
    if type(items) is not list:
        raise FormatError(f"a typed list made of {brief(items)}")
    return items


def _tagged(value: Any, tag: Any) -> Any:
    del tag  # the type of an empty container, in words
    return value


_NAMES: Final = {
    **{
        ("torch.jit._pickle", name): Function(name, _typed_list)
        for name in ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")
    },
    ("torch.jit._pickle", "restore_type_tag"): Function("restore_type_tag", _tagged),
}
