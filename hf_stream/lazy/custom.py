"""A function of one's own as one deferred operation: it runs when its result is needed, on its inputs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_stream.lazy.deferred import as_they_are, lazies_in
from hf_stream.lazy.sources import Compute, Output
from hf_stream.lazy.tensor import LazyTensor


def defer(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """`function(*inputs)`, deferred if one of the inputs is lazy, and run at once otherwise.

    As a chain of torch's own operations each step would be held as a whole; a function holds what it likes.

    Args:
        function: Gets real tensors, must not write into them, and gives a new contiguous one. Its `repr` counts as what
            it does: two that look the same give the same results, now and in another process.
        inputs: Lazy or real tensors, or meta tensors, for which the result is one.
        shape: The shape of the result.
        dtype: Its dtype.
    """
    if any(tensor.is_meta for tensor in inputs):
        return torch.empty(shape, dtype=dtype, device="meta")
    inputs = as_they_are(tuple(inputs))
    lazies = lazies_in(inputs)
    if not lazies:
        return function(*inputs)
    result = torch.empty(shape, dtype=dtype, device="meta")
    compute = Compute(function, inputs, {}, lazies, (result,))
    return LazyTensor(result, Output(compute, 0), lazies[0].device)
