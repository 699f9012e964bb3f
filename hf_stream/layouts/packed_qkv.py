"""One packed projection in place of separate query, key and value projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hf_stream.checkpoint.config import config_of
from hf_stream.errors import LayoutError
from hf_stream.layouts.any_of import AnyOf
from hf_stream.layouts.from_config import QkvSizes
from hf_stream.layouts.joining import Concat
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.rule import Rule

NAMES: dict[str, tuple[tuple[str, str, str], str, str]] = {
    "llama": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj", "concat"),
    "bert": (("attention.self.query", "attention.self.key", "attention.self.value"), "attention.self.qkv", "concat"),
    "gpt_neox": (
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attention.query_key_value",
        "per_head",
    ),
    "bloom": (
        ("self_attention.q_proj", "self_attention.k_proj", "self_attention.v_proj"),
        "self_attention.query_key_value",
        "per_head",
    ),
    "falcon": (
        ("self_attention.q_proj", "self_attention.k_proj", "self_attention.v_proj"),
        "self_attention.query_key_value",
        "per_group",
    ),
}
"""Separate modules, the packed one, and how its rows are arranged, as families of models have them."""

_ALTERNATIVES = ("llama", "bert")


def packed_qkv(
    config: object = None,
    *,
    style: Literal["concat", "per_head", "per_group"] | None = None,
    num_heads: int | None = None,
    num_key_value_heads: int | None = None,
    names: str | Sequence[str] | None = None,
    dst: str | None = None,
) -> Layout:
    """Pack query, key and value projections, weights and biases.

    With H query heads of d rows each, K key and K value heads, and H = K * r:

        style         packed weight [(H + 2K) * d, in], rows from the top                    found in
        "concat"      all of q [H * d], all of k [K * d], all of v [K * d]                   Phi-3, vLLM
        "per_head"    for each head: q [d], k [d], v [d]; needs K = H                        GPT-NeoX, BLOOM
        "per_group"   for each key head: its r query heads [r * d], k [d], v [d]             Megatron, Falcon

        >>> import torch
        >>> q, k = torch.empty(32, 16), torch.empty(8, 16)
        >>> separate = {f"layers.0.self_attn.{x}_proj.weight": w for x, w in zip("qkv", (q, k, k))}
        >>> pack = packed_qkv(num_heads=8, num_key_value_heads=2)
        >>> {name: list(tensor.shape) for name, tensor in pack(separate).items()}
        {'layers.0.self_attn.qkv_proj.weight': [48, 16]}
        >>> pack.inverse(pack(separate)).keys() == separate.keys()
        True

    Only numbers of heads are needed; the rows of a head follow from the tensors. Without a config or numbers they are
    read where the layout is used: from the config beside the checkpoint (`convert`, `verify`, a `Checkpoint`) or that
    of the model (`from_pretrained`, `save_pretrained`, `load_into`). Where there is none ("concat" only), the three
    must have equal shapes. A layer may have weights without biases; but a query bias without a key bias is an error.

    The inverse takes packed projections apart: `packed_qkv(names="gpt_neox").inverse` those of GPT-NeoX.

    Args:
        config: The model's config, an object or a dict, its path, or the model; numbers of heads are read from it.
        style: How the rows are arranged, see above. Default: as the models of these names have it, else "concat".
        num_heads: Number of query heads; overrides the config.
        num_key_value_heads: Number of key heads and of value heads; overrides the config. Default: `num_heads`.
        names: How the modules are called, which tells the style as well:
            "llama" (`self_attn.q_proj`, `self_attn.qkv_proj`), "bert" (`attention.self.query`, `attention.self.qkv`),
            "gpt_neox" (`attention.q_proj`, `attention.query_key_value`),
            "bloom" and "falcon" (`self_attention.q_proj`, `self_attention.query_key_value`),
            or the ends of the three separate modules' names. Default: "llama" or "bert", whichever is there.
        dst: The end of the packed module's name. Default: see above.

    Raises:
        LayoutError: numbers of heads do not suit the style, or names and dst do not fit together. When the layout is
            called: numbers of heads are missing.
    """
    config = config_of(config)
    rules: list[Rule] = []
    for separate, packed, usual in _modules(names, dst):
        sizes = QkvSizes(_checked(style or usual), num_heads, num_key_value_heads)
        srcs = [f"{{prefix:*}}.{module}.{{kind:weight|bias}}" for module in separate]
        rule = Concat(srcs, f"{{prefix}}.{packed}.{{kind}}", sizes=sizes)
        told = config is not None or num_heads is not None or num_key_value_heads is not None
        rules.append(rule.with_config(config) if told else rule)
    return Layout(rules if len(rules) == 1 else [AnyOf(rules)])


def _checked(style: str) -> str:
    if style not in ("concat", "per_head", "per_group"):
        raise LayoutError(f"style must be 'concat', 'per_head' or 'per_group', got '{style}'.")
    return style


def _modules(names: str | Sequence[str] | None, dst: str | None) -> list[tuple[Sequence[str], str, str]]:
    """Separate modules, the packed one, and its usual style."""
    if names is None:
        if dst is not None:
            raise LayoutError(f"packed_qkv: dst='{dst}' needs names= as well, 'llama', 'bert' or three module names.")
        return [NAMES[family] for family in _ALTERNATIVES]
    if isinstance(names, str):
        if names not in NAMES:
            raise LayoutError(
                f"packed_qkv: names '{names}' is not known. Use {' or '.join(map(repr, NAMES))}, "
                "or give three module names."
            )
        separate, packed, style = NAMES[names]
        return [(separate, dst or packed, style)]
    if len(names) != 3 or dst is None:
        raise LayoutError(f"packed_qkv: names= needs three module names and dst=, got {list(names)} and dst={dst!r}.")
    return [(tuple(names), dst, "concat")]
