"""Whether what a thread computes is recorded, down to the memory that it makes and fills, or happens at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("hf_stream.lazy")


class _State(threading.local):
    recording = False
    said: frozenset[str] = frozenset()


_state = _State()


def is_recording() -> bool:
    """Whether this thread records."""
    return _state.recording


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """Record in this thread within the block, or do not."""
    before = _state.recording, _state.said
    _state.recording = on
    try:
        yield
    finally:
        _state.recording, _state.said = before


def say_once(what: str, nbytes: int) -> None:
    """Warn, once in a recording, that something asks for values and reads files while it should only be planned."""
    if nbytes and what not in _state.said:
        _state.said |= {what}
        logger.warning(
            "a layout asks for values while it is planned (%s): %d bytes are read now; what is made of them is held "
            "until it is used, and no plan counts it",
            what,
            nbytes,
        )
