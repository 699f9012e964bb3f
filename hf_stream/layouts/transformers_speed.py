"""What transformers does once for each key of a checkpoint, done only where something comes of it.

It compiles a regular expression for each key that it renames, and copies a whole converter for each key that goes into
one. Most of these are never used; a checkpoint with 30,000 tensors waits seconds for them.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import core_model_loading

from hf_stream.formats.shared import Shared


@Shared
@contextmanager
def little_work_per_key() -> Iterator[None]:
    """Run a block in which transformers compiles patterns when they are first used, and copies converters to use."""
    names = vars(core_model_loading)
    before = {name: names[name] for name in ("re", "deepcopy")}
    names.update(re=_LatePatterns(), deepcopy=_Copies())
    try:
        yield
    finally:
        names.update(before)


class _LatePatterns:
    """The module `re`, but `compile` compiles nothing yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def compile(self, pattern: str, flags: int = 0) -> _LatePattern:
        return _LatePattern(pattern, flags)


class _LatePattern:
    """A pattern that is compiled when one of its attributes is asked for; the patterns live on after the block."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._arguments = pattern, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_arguments":
            raise AttributeError(name)
        compiled = re.compile(*self._arguments)
        value = getattr(compiled, name)
        # Methods of patterns keep the pattern alive, so the next one who asks finds it here.
        self.__dict__[name] = value
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> _LatePattern:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return re.compile, self._arguments


class _Copies:
    """`deepcopy`, but a copy of a converter that nobody has given a tensor is given out again.

    Transformers makes one for each key, and throws all away but the first for each parameter.
    """

    def __init__(self) -> None:
        self._here = threading.local()

    def __call__(self, original: Any) -> Any:
        if not isinstance(original, core_model_loading.WeightTransform):
            return copy.deepcopy(original)
        # By id, with the original, so that its id stays its own.
        spares: dict[int, tuple[Any, Any]] = self._here.__dict__.setdefault("spares", {})
        _, spare = spares.get(id(original), (None, None))
        if spare is None or spare.collected_tensors or spare.layer_targets:
            spare = copy.deepcopy(original)
            spares[id(original)] = original, spare
        return spare
