"""The one way in: methods of `PreTrainedModel` that stream where somebody has asked for it, and are plain elsewhere.

Auto classes, pipelines and wrapped models choose the class themselves, so it is the base class that is hooked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_stream.checkpoint import AnyLayout
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress


@dataclass(frozen=True)
class Request:
    """How to stream the call that is under way."""

    layout: AnyLayout | None = None
    buffer_size: int = DEFAULT_BUFFER_SIZE
    progress: bool | Progress | None = None


_request: ContextVar[Request | None] = ContextVar("hf_stream_request", default=None)


def current_request() -> Request | None:
    """How the call that is under way in this context is to stream; None if nobody has asked."""
    return _request.get()


@contextmanager
def asking(request: Request | None) -> Iterator[None]:
    """Have the calls of this context streamed in this way, or not at all."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


@contextmanager
def hooked(name: str, stream: Callable[..., Any]) -> Iterator[None]:
    """Run a block in which a method of `PreTrainedModel` streams where that is asked for.

    Calls in other threads see the hook and pass through it untouched. Blocks that overlap must share one (`Shared`).

    Args:
        name: The method.
        stream: Gets the plain method, the request, and the arguments of the call.
    """
    before = PreTrainedModel.__dict__[name]
    plain = getattr(PreTrainedModel, name)

    @functools.wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        request = current_request()
        if request is None:
            return plain(*args, **kwargs)
        return stream(plain, request, *args, **kwargs)

    hook = staticmethod(method) if isinstance(before, staticmethod) else method
    setattr(PreTrainedModel, name, hook)
    try:
        yield
    finally:
        # Whoever has put something over the hook meanwhile keeps it; it calls the plain method through the hook.
        if PreTrainedModel.__dict__[name] is hook:
            setattr(PreTrainedModel, name, before)
