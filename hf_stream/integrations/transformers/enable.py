"""Plain calls of transformers that stream: in a block (`streaming`), or in the whole process (`enable`, `disable`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hf_stream.checkpoint import AnyLayout
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.integrations.transformers.hooks import Request, ask_everywhere, asking
from hf_stream.integrations.transformers.load import streamed_loads
from hf_stream.integrations.transformers.save import streamed_saves
from hf_stream.utils.sizes import nbytes_of

_lock = threading.Lock()
_hooks = ExitStack()
_enabled = False


@contextmanager
def streaming(
    layout: AnyLayout | None = None,
    *,
    strict: bool = False,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> Iterator[None]:
    """Have plain `from_pretrained` and `save_pretrained` of transformers stream, inside a block.

    That holds for every model class and Auto class, and for whatever calls them (pipelines, the Trainer, other
    libraries) in the same thread or asynchronous task; other threads are as before. Blocks nest; the innermost counts.
    Afterwards transformers is as it was. `hf_stream.from_pretrained` and `hf_stream.save_pretrained` go by their own
    arguments.

    Args:
        layout: Maps the tensors of each checkpoint that is loaded; what is saved goes through its inverse.
        strict: Whether a rule of the layout that finds nothing is an error, and not a warning.
        buffer_size: Bytes in flight, at most, in each call, also as text such as "64MB".
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    >>> with hf_stream.streaming():  # doctest: +SKIP
    ...     model = transformers.AutoModelForCausalLM.from_pretrained("org/repo")
    """
    request = Request(layout, strict=strict, buffer_size=nbytes_of(buffer_size, "buffer_size"), progress=progress)
    with streamed_loads(), streamed_saves(), asking(request):
        yield


def enable(*, buffer_size: int | str = DEFAULT_BUFFER_SIZE, progress: bool | Progress | None = None) -> None:
    """Have plain `from_pretrained` and `save_pretrained` of transformers stream in the whole process, until `disable`.

    Threads that run or start meanwhile are included, processes are not. Once enabled, another call only changes the
    arguments. What a `streaming` block asks for stands inside it.

    Args:
        buffer_size: Bytes in flight, at most, in each call, also as text such as "64MB".
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.
    """
    global _enabled
    request = Request(buffer_size=nbytes_of(buffer_size, "buffer_size"), progress=progress)
    with _lock:
        ask_everywhere(request)
        if not _enabled:
            _hooks.enter_context(streamed_loads())
            _hooks.enter_context(streamed_saves())
            _enabled = True


def disable() -> None:
    """Undo `enable`: transformers is as it was, apart from blocks and calls of hf_stream that are under way."""
    global _enabled
    with _lock:
        ask_everywhere(None)
        _hooks.close()
        _enabled = False
