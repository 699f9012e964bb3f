"""Files that hold one tensor each, as SwiftTransformer has them: what they, and the attributes in them, are called."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from hf_stream.errors import FormatError

_FILE: Final = re.compile(
    r"(?P<name>(?P<attribute>([^/]+\.)?(weight|bias))(\.tp_(?P<partition>0|[1-9]\d*))?)\.pt", re.DOTALL
)
_MAX_NBYTES: Final = 255

FAMILY: Final = _FILE.pattern


def archive_name(name: str) -> tuple[str, str]:
    """The file of a tensor, and its attribute there: "fc1.weight.tp_3" -> ("fc1.weight.tp_3.pt", "fc1.weight").

    Raises:
        FormatError: It is not the name of a weight or a bias, whole or a partition, or too long for a file.
    """
    file = f"{name}.pt"
    found = _FILE.fullmatch(file)
    if found is None or file.startswith(".") or len(file.encode()) > _MAX_NBYTES:
        raise FormatError(
            f"{name!r:.300} cannot be the name of a TorchScript file: it must end in .weight or .bias, maybe with "
            ".tp_0 or so after it, and be short. Rename the tensor, or write safetensors."
        )
    return file, found["attribute"]


def archive_attribute(file: str) -> str | None:
    """The attribute in a file of this name; None if it cannot be such a file."""
    found = _FILE.fullmatch(file)
    return found["attribute"] if found and not file.startswith(".") else None


def missing_partition(files: Iterable[str]) -> tuple[str, int, int] | None:
    """An attribute that lacks a partition, the number of that, and how many others have; None if all is there."""
    partitions: dict[str, set[int]] = {}
    for file in files:
        found = _FILE.fullmatch(file)
        if found and found["partition"] is not None:
            partitions.setdefault(found["attribute"], set()).add(int(found["partition"]))
    count = 1 + max((number for numbers in partitions.values() for number in numbers), default=-1)
    for attribute, numbers in partitions.items():
        if len(numbers) < count:
            return attribute, next(number for number in range(count) if number not in numbers), count
    return None
