"""Transformers' progress bars, while what they count is symbolic and done in no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

from hf_stream.integrations.transformers.shared import Shared


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
