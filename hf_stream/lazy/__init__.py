"""Tensors that are not loaded yet: expressions over bytes, and how they become copies."""

from __future__ import annotations

from hf_stream.lazy.custom import defer
from hf_stream.lazy.given import named_tensors
from hf_stream.lazy.planning import planned
from hf_stream.lazy.run import materialize, write_into
from hf_stream.lazy.survey import fingerprint, reads, working_set
from hf_stream.lazy.tensor import LazyTensor, dressed

__all__ = [
    "LazyTensor",
    "defer",
    "dressed",
    "fingerprint",
    "materialize",
    "named_tensors",
    "planned",
    "reads",
    "working_set",
    "write_into",
]
