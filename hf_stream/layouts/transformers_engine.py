"""transformers' own conversions, run on tensors that are not loaded: quick, and without a word.

What happens here is symbolic and done in no time, so it needs neither transformers' threads nor its progress bars.
Imported by those who have transformers, and by nobody else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

from hf_stream.formats.shared import Shared


@Shared
@contextmanager
def no_bars() -> Iterator[None]:
    """Run a block in which transformers shows no bars; ours count the bytes."""
    before = set_tqdm_hook(_disabled)
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _disabled(factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return factory(*args, **{**kwargs, "disable": True})


@Shared
@contextmanager
def no_thread_pool() -> Iterator[None]:
    """Transformers' loading threads have nothing to wait for here, and slow symbolic work down."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
