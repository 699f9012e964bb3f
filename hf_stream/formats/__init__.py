"""Bytes and their meaning: the safetensors header, the index file, shard names and sizes. No torch ops, no policy."""

from __future__ import annotations

from hf_stream.formats.index import WeightIndex, encode_index, read_index
from hf_stream.formats.safetensors import Header, TensorInfo, encode_header, header_nbytes, parse_header, read_header
from hf_stream.formats.shards import (
    SAFE_WEIGHTS,
    SAFE_WEIGHTS_INDEX,
    add_variant,
    is_weight_file,
    shard_pattern,
    split_into_shards,
)

__all__ = [
    "SAFE_WEIGHTS",
    "SAFE_WEIGHTS_INDEX",
    "Header",
    "TensorInfo",
    "WeightIndex",
    "add_variant",
    "encode_header",
    "encode_index",
    "header_nbytes",
    "is_weight_file",
    "parse_header",
    "read_header",
    "read_index",
    "shard_pattern",
    "split_into_shards",
]
