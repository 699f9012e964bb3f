"""transformers' Auto classes, streaming: what they load and make also saves by streaming."""

from __future__ import annotations

import functools
import os
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from hf_stream.checkpoint import AnyLayout
from hf_stream.copying.progress import Progress
from hf_stream.integrations.transformers.hooks import Origin, Request, current_request
from hf_stream.integrations.transformers.load import load_whole, with_dtypes
from hf_stream.integrations.transformers.save import streamed_saves


def auto_names() -> list[str]:
    """The names of all Auto classes that transformers has."""
    return sorted(name for name in dir(transformers.models.auto) if name.startswith("Auto"))


@functools.cache
def auto_class(name: str) -> type:
    """An Auto class that streams; one of something else than models (tokenizers, configs), as transformers has it.

    Args:
        name: One of `auto_names`.
    """
    plain: type = getattr(transformers, name)
    if not issubclass(plain, _BaseAutoModelClass):
        return plain
    # The name is looked up in a checkpoint's config, and a subclass shares what is registered.
    return type(name, (_StreamingAuto, plain), {"__module__": "hf_stream", "__doc__": plain.__doc__})


class _StreamingAuto:
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        layout: AnyLayout | None = None,
        strict: bool = False,
        buffer_size: int | str | None = None,
        progress: bool | Progress | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, streaming; see `hf_stream.from_pretrained`.

        The model's own `save_pretrained` streams too, and leads back through the layout.
        """
        request = (current_request() or Request()).changed(buffer_size, progress)
        if layout is not None:
            request = replace(request, layout=layout, strict=strict)

        kwargs = with_dtypes(kwargs)

        def load() -> Any:
            return super(_StreamingAuto, cls).from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[misc]

        loaded = load_whole(request, pretrained_model_name_or_path, kwargs.get("subfolder"), load)
        _mark(loaded[0] if isinstance(loaded, tuple) else loaded, request.layout)
        return loaded

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the model's own `save_pretrained` streams."""
        model = super().from_config(*args, **kwargs)  # type: ignore[misc]
        _mark(model, None)
        return model


class _HookedOrigin(Origin):
    """Keeps the hook in place as long as a model is there that wants it.

    A mark on the model, and not a `save_pretrained` of its own: that would have to know the model, which then would
    keep its memory until the garbage collector comes by. The mark goes where the model goes, into copies, pickles
    (which need hf_stream to be read) and wrappers; classes keep their names, which stand in saved configs.
    """

    def __init__(self, layout: AnyLayout | None) -> None:
        super().__init__(layout)
        hook = ExitStack()
        hook.enter_context(streamed_saves())
        weakref.finalize(self, hook.close)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles hold the hook as well.
        return _HookedOrigin, (self.layout,)


def _mark(model: Any, layout: AnyLayout | None) -> None:
    if isinstance(model, PreTrainedModel):
        setattr(model, Origin.attribute, _HookedOrigin(layout))
