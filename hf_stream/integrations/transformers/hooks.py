"""The one way in: methods of `PreTrainedModel` that stream where somebody has asked for it, and are plain elsewhere.

Auto classes, pipelines and wrapped models choose the class themselves, so it is the base class that is hooked. What may
ask is a block or call of this context (`asking`), the whole process (`ask_everywhere`), or the model (`Origin`).
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
from hf_stream.checkpoint.mapping import check_layout
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.utils.sizes import nbytes_of


@dataclass(frozen=True)
class Request:
    """How to stream the calls that are under way.

    Attributes:
        layout: Maps a checkpoint's tensors to the model's; what is saved goes through its inverse.
        saved_through: Maps what is saved, in place of the inverse of `layout`.
        strict: Whether a rule of a layout that finds nothing is an error, and not a warning.
        durable: Whether what is saved is forced to the disk; None for the default.
        buffer_size: Bytes in flight, at most, also as text such as "64MB".
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.
        lazily: Whether what is loaded is left in the model as lazies, for the caller to read.
        check_files: Called when all files are open; raises an error if what was read before belongs to others.
        layout_used: Called when the layout has mapped what is loaded.
    """

    layout: AnyLayout | None = None
    saved_through: AnyLayout | None = None
    strict: bool = False
    durable: bool | None = None
    buffer_size: int = DEFAULT_BUFFER_SIZE
    progress: bool | Progress | None = None
    lazily: bool = False
    check_files: Callable[[], None] | None = None
    layout_used: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        check_layout(self.layout)
        check_layout(self.saved_through)

    def changed(self, buffer_size: int | str | None, progress: bool | Progress | None) -> Request:
        """The same but for what is given."""
        return replace(
            self,
            buffer_size=self.buffer_size if buffer_size is None else nbytes_of(buffer_size, "buffer_size"),
            progress=self.progress if progress is None else progress,
        )

    def through(self, layout: AnyLayout | None) -> Request:
        """The same through a layout, if it has none."""
        return replace(self, layout=layout) if self.layout is None else self


class Origin:
    """Left on a model whose own `save_pretrained` is to stream, back through the layout that it was loaded with."""

    attribute = "_hf_stream_origin"

    def __init__(self, layout: AnyLayout | None) -> None:
        self.layout = layout


_request: ContextVar[Request | None] = ContextVar("hf_stream_request")
_everywhere: Request | None = None


def current_request() -> Request | None:
    """How the calls of this context are to stream; None if they are not."""
    return _request.get(_everywhere)


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
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        request = _request_for(model)
        if request is None:
            return plain(model, *args, **kwargs)
        return stream(plain, request, model, *args, **kwargs)

    hook = staticmethod(method) if isinstance(before, staticmethod) else method
    setattr(PreTrainedModel, name, hook)
    try:
        yield
    finally:
        # Whoever has put something over the hook meanwhile keeps it; it calls the plain method through the hook.
        if PreTrainedModel.__dict__[name] is hook:
            setattr(PreTrainedModel, name, before)


def _request_for(model: Any) -> Request | None:
    origin: Origin | None = vars(model).get(Origin.attribute)
    if origin is None:
        return current_request()
    # A context that asks for nothing to be streamed counts more than the model.
    request = _request.get(_everywhere or Request())
    return None if request is None else request.through(origin.layout)
