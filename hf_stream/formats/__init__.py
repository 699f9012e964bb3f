"""Bytes and their meaning: the safetensors header, the index file, shard names and sizes."""

from __future__ import annotations

from hf_stream.formats.safetensors import Header, TensorInfo, encode_header, header_nbytes, parse_header, read_header

__all__ = ["Header", "TensorInfo", "encode_header", "header_nbytes", "parse_header", "read_header"]
