"""StreamingMixin: a model class whose own `from_pretrained` and `save_pretrained` stream, through its layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hf_stream.checkpoint import AnyLayout
from hf_stream.integrations.transformers.load import Request, current_request, stream_load
from hf_stream.integrations.transformers.save import stream_save
from hf_stream.layouts import Layout


class StreamingMixin:
    """Put before a model class of transformers: `class Packed(StreamingMixin, BertModel): layout = ...`.

    `from_pretrained` then streams and maps the checkpoint's tensors through `layout`; `save_pretrained` streams and
    maps them back, so that what is saved is in the checkpoint's own layout.
    `save_pretrained(..., save_original_format=False)` saves the tensors as the model holds them.

    Attributes:
        layout: A `Layout`; or a property, when it depends on the model's config.
    """

    layout: AnyLayout | None = None

    @staticmethod
    def _load_pretrained_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        request = current_request() or Request()
        if request.layout is None:
            request = replace(request, layout=model.layout)
        load = super(StreamingMixin, type(model))._load_pretrained_model  # type: ignore[misc]
        return stream_load(load, request, model, *args, **kwargs)

    @property
    def plain_save_pretrained(self) -> Callable[..., None]:
        """The method of transformers that this class streams instead."""
        save: Callable[..., None] = super().save_pretrained  # type: ignore[misc]
        return save

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_original_format: bool = True,
        **kwargs: Any,
    ) -> None:
        """As in transformers, streaming; see `hf_stream.save_pretrained`."""
        layout = self.layout if save_original_format else None
        stream_save(
            self.plain_save_pretrained,
            self,
            save_directory,
            layout=layout.inverse if isinstance(layout, Layout) else None,
            is_main_process=is_main_process,
            state_dict=state_dict,
            save_original_format=save_original_format,
            **kwargs,
        )
