"""The names in the safetensors files of OLMo: each a pickle, in base64, of the keys that lead to a tensor in a nesting.

urlsafe_b64(pickle((("optim", "state", 0, "exp_avg"), False)))     the tensor itself
urlsafe_b64(pickle((("optim", "param_groups"), True)))             its bytes are a pickle of the value

Such files have no metadata.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Collection
from typing import Final, NamedTuple

from hf_stream.errors import FormatError
from hf_stream.formats.budget import Budget
from hf_stream.formats.nested import MAX_DEPTH
from hf_stream.formats.nested_scalars import shown
from hf_stream.formats.plain_pickle import check_plain_key, read_plain

# What a pickle of a tuple begins with: a protocol, or in protocols 0 and 1, which have no mark for it, a bracket.
_STARTS: Final = (pickle.PROTO, pickle.MARK)


class OlmoName(NamedTuple):
    """What a name says.

    Attributes:
        keys: What leads to the value, from the root.
        pickled: Whether the tensor's bytes are a pickle of the value.
    """

    keys: tuple[object, ...]
    pickled: bool


def are_olmo_names(names: Collection[str]) -> bool:
    """Whether all of them, of which there must be some, are pickles in base64; no pickle is read for that."""
    return bool(names) and all(_decoded(name) is not None for name in names)


def parse_olmo_name(name: str, budget: Budget | None = None) -> OlmoName:
    """Decode a name.

    Args:
        name: The name.
        budget: What is left for all names of the file; by default, what this name alone has.

    Raises:
        FormatError: It tells something else than keys and a mark, or something that is not plain.
    """
    data = _decoded(name)
    if data is None:
        raise FormatError(f"{shown(name)} is no pickle in base64")
    try:
        content = read_plain(data, budget)
        if type(content) is not tuple or [type(part) for part in content] != [tuple, bool]:
            raise FormatError("it is no pair of keys and a mark")
        keys, pickled = content
        if not 0 < len(keys) <= MAX_DEPTH:
            raise FormatError(f"it has {len(keys)} keys, known are 1 to {MAX_DEPTH}")
        for key in keys:
            check_plain_key(key)
    except FormatError as error:
        raise FormatError(f"the name {shown(name)} is none of OLMo's: {error}") from None
    return OlmoName(keys, pickled)


def _decoded(name: str) -> bytes | None:
    try:
        data = base64.b64decode(name, altchars=b"-_", validate=True)
    except ValueError:
        return None
    return data if data.startswith(_STARTS) and data.endswith(pickle.STOP) else None
