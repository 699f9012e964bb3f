"""Quantized models: a quantizer gets real tensors, those of one parameter at a time; all others stay lazy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import _pytree as pytree
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hf_stream.lazy import materialize

Convert = Callable[..., Any]


@contextmanager
def real_inputs(load_config: Any, *, buffer_size: int, alias: bool) -> Iterator[None]:
    """Run a block in which the operations of a load's quantizer are given real tensors.

    Transformers calls them for one parameter after the other, and drops what they were given. They may be kernels, or
    build tensor classes of their own around what they get. FP8 dequantization is neither and runs before experts are
    merged, so it stays symbolic: each expert goes straight to its place in the merged parameter.

    Args:
        load_config: Transformers' `LoadStateDictConfig`.
        buffer_size: Bytes in flight, at most.
        alias: Whether tensors that lie in a file just as they are may be given as mappings of it.
    """
    quantizer = load_config.hf_quantizer
    if quantizer is None:
        yield
        return

    def on_real(convert: Convert) -> Convert:
        def convert_real(input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            leaves, structure = pytree.tree_flatten(input_dict)
            reals = materialize(leaves, buffer_size=buffer_size, alias=alias)
            return convert(pytree.tree_unflatten(reals, structure), *args, **kwargs)

        return convert_real

    def quantize_op() -> Any:
        op = plain_quantize_op()
        op.convert = on_real(op.convert)
        return op

    # Set on these very objects, which belong to this load alone: nothing else in the process changes.
    plain_quantize_op = quantizer.get_quantize_ops
    load_ops = [
        op
        for conversion in load_config.weight_mapping or ()
        for op in getattr(conversion, "operations", ())
        if getattr(op, "hf_quantizer", None) is not None and not isinstance(op, Fp8Dequantize)
    ]
    quantizer.get_quantize_ops = quantize_op
    for op in load_ops:
        op.convert = on_real(op.convert)
    try:
        yield
    finally:
        del quantizer.get_quantize_ops
        for op in load_ops:
            del op.convert
