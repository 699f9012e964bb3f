"""transformers' registered conversion of a model as a layout; transformers itself is imported when it is asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hf_stream.checkpoint.casting import ask_for_dtypes
from hf_stream.layouts.composable import Composable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def from_transformers(
    model_or_config: PreTrainedModel | PreTrainedConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
) -> Composable:
    """What transformers converts when it loads a model, as a layout: from the checkpoint's tensors to those in memory.

    Called with the tensors of a checkpoint that `from_pretrained` would load, it gives those that `model.state_dict()`
    would then hold: in that order, under those names, in the dtypes of the file. Old names, a base model's prefix too
    many or too few, and the conversions of models inside the model are dealt with as `from_pretrained` does. Tied
    weights come under each of their names. What transformers leaves unread on purpose is left out; weights that it
    would initialise, or would report as unexpected, are errors. No weights are built: the model is on the meta device.

    The inverse gives what `save_pretrained` would save: given a config, as for a model made from it; given a model, as
    for this very model, which remembers what it was loaded from.

    >>> layout = layouts.from_transformers(AutoConfig.from_pretrained("mixtral"))  # doctest: +SKIP
    >>> hf_stream.convert("mixtral", "in-memory", layout=layout)  # doctest: +SKIP
    >>> hf_stream.convert("in-memory", "again", layout=layout.inverse)  # doctest: +SKIP

    Args:
        model_or_config: A model, with the modules and ties that it has at this moment (its weights are not kept); a
            config; or the content of a config.json or its path. A config stands for the first of its `architectures`,
            or else the base model.
        strict: Whether weights that are missing, and names that the model does not have, are errors; otherwise the
            former are missing in the result as well, and the latter are dropped.

    Raises:
        LayoutError: The model is quantized, or transformers does not know the type or the architecture.
    """
    from hf_stream.layouts.transformers_layout import layout_of

    return layout_of(model_or_config, strict=strict)


def own_dtypes(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """The dtypes, by name, of those tensors that transformers would not load as `dtype` if told to load that.

    These are modules that a model keeps in float32 (`_keep_in_fp32_modules`, `_keep_in_fp32_modules_strict`), and
    parameters and buffers that it makes in a dtype of their own. Of a config that transformers does not know there are
    none, and a warning.

    Args:
        config: The content of config.json.
        tensors: The checkpoint's.
        dtype: What `from_pretrained` would be given.
    """
    if "model_type" not in config:
        return {}
    from hf_stream.layouts.transformers_dtypes import dtypes_of

    try:
        return dtypes_of(config, tensors, dtype)
    except Exception as error:  # noqa: BLE001 - whatever a config or a model says against being built
        logger.warning(
            "all floating-point tensors become %s, also those that the model may keep in float32, as transformers "
            "does not build it: %s",
            dtype,
            error,
        )
        return {}


ask_for_dtypes(own_dtypes)
