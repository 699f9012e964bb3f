"""Names and shapes, both ways: rules, `Layout`, and layouts ready made."""

from hf_stream.checkpoint import AnyLayout
from hf_stream.layouts.any_of import AnyOf
from hf_stream.layouts.composable import Composable
from hf_stream.layouts.dequantize_fp8_blocks import dequantize_fp8_blocks
from hf_stream.layouts.from_transformers import from_transformers
from hf_stream.layouts.joining import Concat, Split, Stack, Unstack
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.lora_base_layers import lora_base_layers
from hf_stream.layouts.lora_merge import merge_lora
from hf_stream.layouts.meta_llama import meta_llama
from hf_stream.layouts.metaseq_opt import metaseq_opt
from hf_stream.layouts.naming import Apply, Drop, Rename
from hf_stream.layouts.packed_gate_up import packed_gate_up
from hf_stream.layouts.packed_qkv import packed_qkv
from hf_stream.layouts.registry import get, load, names
from hf_stream.layouts.reshaping import Cast, Rearrange, Slice, Transpose
from hf_stream.layouts.rule import Rule
from hf_stream.layouts.stacked_experts import stacked_experts
from hf_stream.layouts.swift_transformer import swift_transformer

__all__ = [
    "AnyLayout",
    "AnyOf",
    "Apply",
    "Cast",
    "Composable",
    "Concat",
    "Drop",
    "Layout",
    "Rearrange",
    "Rename",
    "Rule",
    "Slice",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "dequantize_fp8_blocks",
    "from_transformers",
    "get",
    "load",
    "lora_base_layers",
    "merge_lora",
    "meta_llama",
    "metaseq_opt",
    "names",
    "packed_gate_up",
    "packed_qkv",
    "stacked_experts",
    "swift_transformer",
]
