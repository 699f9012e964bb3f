"""StreamingMixin: a model class whose own `from_pretrained` and `save_pretrained` stream, through its layout."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_stream.checkpoint import AnyLayout
from hf_stream.errors import LayoutError
from hf_stream.integrations.transformers.hooks import Request, current_request
from hf_stream.integrations.transformers.load import stream_load
from hf_stream.integrations.transformers.save import save_pretrained
from hf_stream.layouts import Layout


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
        request = current_request() or Request()
        if request.layout is None:
            request = replace(request, layout=_layout_of(model))
        load = super(StreamingMixin, type(model))._load_pretrained_model  # type: ignore[misc]
        return stream_load(load, request, model, *args, **kwargs)

    @property
    def _plain_save_pretrained(self) -> Callable[..., None]:
        """The method of transformers that this class streams instead."""
        save: Callable[..., None] = super().save_pretrained  # type: ignore[misc]
        return save

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        *,
        save_original_format: bool = True,
        **kwargs: Any,
    ) -> None:
        """As in transformers, streaming; see `hf_stream.save_pretrained`.

        Raises:
            LayoutError: The original format is asked for, and `layout` has no inverse.
        """
        layout = _layout_of(self) if save_original_format else None
        if layout is not None and not isinstance(layout, Layout):
            raise LayoutError(
                f"the layout of {type(self).__name__} is a plain function, which has no inverse; "
                "make it a Layout, or pass save_original_format=False to save the tensors as the model holds them"
            )
        save_pretrained(
            self,
            save_directory,
            layout=layout.inverse if layout is not None else None,
            is_main_process=is_main_process,
            state_dict=state_dict,
            save_original_format=save_original_format,
            **kwargs,
        )


def _layout_of(model: StreamingMixin) -> AnyLayout | None:
    """The layout of a model's class; a plain function is no method of it."""
    layout = inspect.getattr_static(model, "layout")
    if hasattr(layout, "__get__") and not inspect.isfunction(layout):
        layout = layout.__get__(model)
    found: AnyLayout | None = layout
    return found
