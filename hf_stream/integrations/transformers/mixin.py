"""StreamingMixin: a model class whose own `from_pretrained` and `save_pretrained` stream, through its layout."""

from __future__ import annotations

import inspect
import os
from typing import Any

from transformers import PreTrainedModel

from hf_stream.checkpoint import AnyLayout
from hf_stream.errors import LayoutError
from hf_stream.integrations.transformers.hooks import Origin, Request, asking, current_request
from hf_stream.integrations.transformers.load import streamed_loads
from hf_stream.integrations.transformers.save import streamed_saves


class StreamingMixin:
    """Put before a model class of transformers: `class Packed(StreamingMixin, BertModel): layout = ...`.

    `from_pretrained` then streams and maps the checkpoint's tensors through `layout`; `save_pretrained` streams and
    maps them back, so that what is saved is in the checkpoint's own layout.
    `save_pretrained(..., save_original_format=False)` saves the tensors as the model holds them.

    Attributes:
        layout: A `Layout`; a property that gives one, when it depends on the model's config; or a plain function from
            named tensors to named tensors, which can load but not save.
    """

    layout: AnyLayout | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse an order of base classes in which nothing here would ever be called."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if PreTrainedModel in order and order.index(PreTrainedModel) < order.index(StreamingMixin):
            raise LayoutError(
                f"{cls.__name__}: StreamingMixin stands behind the model class, whose methods would be called instead; "
                f"write class {cls.__name__}(StreamingMixin, ...)"
            )

    @staticmethod
    def _load_pretrained_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        with streamed_loads(), asking((current_request() or Request()).through(layout_of(model))):
            return super(StreamingMixin, type(model))._load_pretrained_model(model, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers, streaming, and back through `layout`; see `hf_stream.save_pretrained`.

        Raises:
            LayoutError: The original format is asked for, and `layout` has no inverse.
        """
        with streamed_saves(), asking((current_request() or Request()).through(layout_of(self))):
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


def layout_of(model: Any) -> AnyLayout | None:
    """What a model's own `save_pretrained` leads back through: the layout it was loaded with, or that of its class.

    A plain function as the layout of a class is no method of it.
    """
    origin: Origin | None = vars(model).get(Origin.attribute)
    if origin is not None and origin.layout is not None:
        return origin.layout
    if not isinstance(model, StreamingMixin):
        return None
    layout = inspect.getattr_static(model, "layout")
    if hasattr(layout, "__get__") and not inspect.isfunction(layout):
        layout = layout.__get__(model)
    found: AnyLayout | None = layout
    return found
