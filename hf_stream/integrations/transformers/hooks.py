"""The one way in: methods of `PreTrainedModel` that stream where somebody has asked for it, and are plain elsewhere.

Auto classes, pipelines and wrapped models choose the class themselves, so it is the base class that is hooked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from hf_stream.checkpoint import AnyLayout
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress


@dataclass(frozen=True)
class Request:
    """How to stream the calls that are under way.

    Attributes:
        layout: Maps a checkpoint's tensors to the model's; what is saved goes through its inverse.
        saved_through: Maps what is saved, in place of the inverse of `layout`.
        buffer_size: Bytes in flight, at most.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.
    """

    layout: AnyLayout | None = None
    saved_through: AnyLayout | None = None
    buffer_size: int = DEFAULT_BUFFER_SIZE
    progress: bool | Progress | None = None


_request: ContextVar[Request | None] = ContextVar("hf_stream_request")
_everywhere: Request | None = None


def current_request() -> Request | None:
    """How the calls of this context are to stream; None if they are not."""
    return _request.get(_everywhere)


def request_with(
    layout: AnyLayout | None = None, buffer_size: int | None = None, progress: bool | Progress | None = None
) -> Request:
    """The request of this context, or a new one, changed by what is given.

    A layout that the context asks for, for loading or for saving, stands.
    """
    request = current_request() or Request()
    if layout is not None and request.layout is None and request.saved_through is None:
        request = replace(request, layout=layout)
    if buffer_size is not None:
        request = replace(request, buffer_size=buffer_size)
    if progress is not None:
        request = replace(request, progress=progress)
    return request


@contextmanager
def asking(request: Request | None) -> Iterator[None]:
    """Have the calls of this context streamed in this way, or not at all."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def ask_everywhere(request: Request | None) -> None:
    """Have the calls of every context that has not asked for itself streamed in this way, or not at all."""
    global _everywhere
    _everywhere = request


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
