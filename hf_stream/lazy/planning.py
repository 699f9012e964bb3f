"""Run a function on lazies so that nothing is computed: the memory that it makes and fills is recorded, too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hf_stream.errors import LazyTensorError
from hf_stream.lazy.buffers import fresh, made
from hf_stream.lazy.recording import is_recording, recording
from hf_stream.lazy.tensor import LazyTensor

logger = logging.getLogger("hf_stream.lazy")

T = TypeVar("T")


def planned(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, where new tensors (`torch.empty`, `zeros_like`, ...) are lazy, and may be written to.

    So that a function which fills `out = torch.empty(...)` piece by piece is deferred like any other. What cannot be
    recorded (the memory of a new tensor is asked for, say) has the function run once more, with real new tensors; a
    warning says so.
    """
    try:
        if is_recording():
            return function(*args)
        with recording(True), _Recorder():  # type: ignore[no-untyped-call]
            return function(*args)
    except LazyTensorError as error:
        with recording(False):
            result = function(*args)
        logger.warning(
            "%s cannot be planned, and runs now: what it makes is held until it is used, and no plan counts it (%s)",
            getattr(function, "__qualname__", None) or repr(function),
            error,
        )
        return result


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has new tensors made as lazies, and lets results of lazies be written to."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_recording():
            return func(*args, **kwargs)
        lazy = made(func, args, kwargs)
        if lazy is not None:
            return lazy
        out = func(*args, **kwargs)
        if func.is_view or func._schema.is_mutable:
            return out
        return pytree.tree_map_only(LazyTensor, fresh, out)
