"""OPT and Llama by the names of metaseq, Meta and transformers, as whole weights by SwiftTransformer's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.naming import Rename
from hf_stream.layouts.rule import shape_text
from hf_stream.layouts.swift_partitions import LAYER, PARTITION

_LISTED: Final = 3
_NO_POSITIONS: Final = 2  # rows of OPT's table before that of the first position

_TOKENS: Final = "decoder.embed_tokens.weight"
_POSITIONS: Final = "decoder.embed_positions.weight"
_OUTPUT: Final = "decoder.output_projection.weight"
_NORM: Final = "decoder.layer_norm"
# What has as many rows as which table.
_TABLES: Final = {"embed_tokens": _TOKENS, "output_projection": _TOKENS, "embed_positions": _POSITIONS}

_LAYER: Final = "decoder.layers.{layer:int}"
_KIND: Final = "{kind:weight|bias}"
_OPT_NAMES: Final = Layout(
    [
        Rename("model.decoder.{table:embed_tokens|embed_positions}.weight", "decoder.{table}.weight"),
        Rename(f"model.decoder.final_layer_norm.{_KIND}", f"{_NORM}.{{kind}}"),
        Rename(
            f"model.{_LAYER}.{{module:fc1|fc2|self_attn_layer_norm|final_layer_norm}}.{_KIND}",
            f"{_LAYER}.{{module}}.{{kind}}",
        ),
        Rename(
            f"model.{_LAYER}.self_attn.{{module:q_proj|k_proj|v_proj|out_proj}}.{_KIND}",
            f"{_LAYER}.self_attn.{{module}}.{{kind}}",
        ),
    ]
)
META_NAMES: Final = Layout(
    [
        Rename("tok_embeddings.weight", _TOKENS),
        Rename("norm.weight", f"{_NORM}.weight"),
        Rename("output.weight", _OUTPUT),
        *(
            Rename(f"layers.{{layer:int}}.{meta}.weight", f"{_LAYER}.{swift}.weight")
            for meta, swift in {
                "attention.wq": "self_attn.q_proj",
                "attention.wk": "self_attn.k_proj",
                "attention.wv": "self_attn.v_proj",
                "attention.wo": "self_attn.out_proj",
                "feed_forward.w1": "fc1",
                "feed_forward.w2": "fc2",
                "feed_forward.w3": "fc3",
                "attention_norm": "self_attn_layer_norm",
                "ffn_norm": "final_layer_norm",
            }.items()
        ),
    ]
)
_MODULES: Final = {
    "OPT": ("fc1", "fc2", "self_attn_layer_norm", "final_layer_norm"),
    "Llama": ("fc1", "fc2", "fc3", "self_attn_layer_norm", "final_layer_norm"),
}
_ATTENTION: Final = tuple(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out"))


def origin(names: Mapping[str, object]) -> str:
    """Who gave the tensors their names."""
    for name in names:
        if PARTITION.fullmatch(name):
            raise LayoutError(f"'{name}' is a partition already. Take the inverse first to divide in another way.")
        if ".self_attn.qkv_proj." in name and "decoder.layers." in name:
            return "metaseq"
        if ".attention.wq." in name:
            return "Meta"
        if ".self_attn.q_proj." in name:
            return "OPT" if "decoder.layers." in name else "Llama"
    raise LayoutError(
        "swift_transformer: no tensor is called as one of attention in OPT or Llama, by metaseq, Meta or transformers. "
        "SwiftTransformer knows no other models."
    )


def whole_opt(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From the names of transformers."""
    # A model without a head has no prefix. The head is tied, and not looked at even if it is there.
    bare = {name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"}
    odd = next((name for name in bare if ".project_" in name), None)
    if odd is not None:
        raise LayoutError(
            f"'{odd}': embeddings of another size than the layers, as in OPT-350M, have no place in SwiftTransformer. "
            "Take an OPT of another size."
        )
    whole, _ = _OPT_NAMES.with_matches({f"model.{name}": t for name, t in bare.items()})
    if _POSITIONS in whole:
        whole[_POSITIONS] = whole[_POSITIONS][_NO_POSITIONS:]
    if _TOKENS in whole:
        whole[_OUTPUT] = whole[_TOKENS]
    return whole


def named_opt(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other way round: to the names of transformers, which ties the output projection."""
    positions = whole[_POSITIONS]
    unused = positions.new_zeros((_NO_POSITIONS, *positions.shape[1:]))
    kept = {name: tensor for name, tensor in whole.items() if name != _OUTPUT}
    named, _ = _OPT_NAMES.inverse.with_matches({**kept, _POSITIONS: torch.cat([unused, positions])})
    return named


def check_names(family: str, whole: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not a whole model, or more than that."""
    numbers = [int(found[1]) for name in whole if (found := re.match(r"decoder\.layers\.(\d+)\.", name))]
    kinds = ("weight", "bias") if family == "OPT" else ("weight",)
    wanted = {_TOKENS, _OUTPUT, *(f"{_NORM}.{kind}" for kind in kinds), *([_POSITIONS] if family == "OPT" else [])}
    for number in range(1 + max(numbers, default=0)):
        modules = (*_ATTENTION, *_MODULES[family])
        wanted |= {f"{LAYER.format(number)}{module}.{kind}" for module in modules for kind in kinds}
    for names, fact in ((wanted - whole.keys(), "missing"), (whole.keys() - wanted, "of no use to SwiftTransformer")):
        if names:
            listed = ", ".join(f"'{name}'" for name in sorted(names)[:_LISTED])
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise LayoutError(f"{family}: {listed}{more}: {fact}. Check that all of a plain {family} model is there.")


def check_shapes(whole: Mapping[str, torch.Tensor]) -> None:
    """Refuse layers that are not all alike, or whose matrices do not fit together."""
    first = LAYER.format(0)
    for name, tensor in whole.items():
        same = re.sub(r"decoder\.layers\.\d+\.", first, name)
        if tensor.shape != whole[same].shape:
            raise LayoutError(
                f"'{name}' has shape {shape_text(tensor)}, and '{same}' has {shape_text(whole[same])}. "
                "All layers must be alike."
            )
    scalar = next((name for name, tensor in whole.items() if not tensor.ndim), None)
    if scalar is not None:
        raise LayoutError(f"'{scalar}' is a single number. Check that the checkpoint is of this kind.")
    hidden = whole[f"{_NORM}.weight"].shape[0]
    queries, keys, ffn = (whole[f"{first}{module}.weight"].shape[0] for module in (*_ATTENTION[:2], "fc1"))
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "fc1": ffn, "fc3": ffn}
    rows |= {table: whole[name].shape[0] for table, name in _TABLES.items() if name in whole}
    columns = {"out_proj": queries, "fc2": ffn}
    for name, tensor in whole.items():
        module, kind = name.split(".")[-2:]
        wanted = [rows.get(module, hidden)]
        if kind == "weight" and not module.endswith("layer_norm"):
            wanted.append(columns.get(module, hidden))
        if list(tensor.shape) != wanted:
            raise LayoutError(
                f"'{name}' has shape {shape_text(tensor)}, {wanted} wanted. "
                "Check that all parts of the checkpoint are open."
            )
