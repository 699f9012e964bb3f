"""One packed projection in place of separate query, key and value projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hf_stream.errors import LayoutError
from hf_stream.layouts.any_of import AnyOf
from hf_stream.layouts.joining import Concat
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.sizes import attention_heads, parts_with_heads

NAMES: dict[str, tuple[tuple[str, str, str], str]] = {
    "llama": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    "bert": (("attention.self.query", "attention.self.key", "attention.self.value"), "attention.self.qkv"),
}
"""Separate modules and the packed one, as families of models call them."""


def packed_qkv(
    config: object = None,
    *,
    style: Literal["concat", "per_head", "per_group"] = "concat",
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

    Only numbers of heads are needed; the rows of a head follow from the tensors. Without them ("concat" only) the three
    must have equal shapes. A layer may have weights without biases; but a query bias without a key bias is an error.

    Args:
        config: The model's config, an object or a dict; numbers of heads are read from it.
        style: How the rows are arranged, see above.
        num_heads: Number of query heads; overrides the config.
        num_key_value_heads: Number of key heads and of value heads; overrides the config. Default: `num_heads`.
        names: How the separate modules are called: "llama" (`self_attn.q_proj`), "bert" (`attention.self.query`), or
            the ends of the three modules' names. Default: both of the known ones, whichever is there.
        dst: The end of the packed module's name. Default: `self_attn.qkv_proj`, `attention.self.qkv`.

    Raises:
        LayoutError: numbers of heads are missing or do not suit the style, or names and dst do not fit together.
    """
    parts = parts_with_heads(config)
    if style != "concat" and num_heads is None and len(parts) > 1:
        # The same names in each of them, but other numbers of heads: rows would be dealt wrongly and still fit.
        raise LayoutError(
            f"packed_qkv: style '{style}' deals rows by heads, and the config has {len(parts)} parts with heads: "
            f"{', '.join(parts)}. Build a layout from each part's own config and put it in its place with .scoped()."
        )
    sizes, groups = _arrangement(style, attention_heads(config, num_heads, num_key_value_heads))
    rules = []
    for separate, packed in _modules(names, dst):
        srcs = [f"{{prefix:*}}.{module}.{{kind:weight|bias}}" for module in separate]
        rules.append(Concat(srcs, f"{{prefix}}.{packed}.{{kind}}", sizes=sizes, groups=groups))
    return Layout(rules if len(rules) == 1 else [AnyOf(rules)])


def _arrangement(style: str, heads: tuple[int, int] | None) -> tuple[tuple[int, int, int] | None, int]:
    """Proportion of q, k and v, and the number of groups in which they are dealt."""
    if style not in ("concat", "per_head", "per_group"):
        raise LayoutError(f"style must be 'concat', 'per_head' or 'per_group', got '{style}'.")
    if heads is None:
        if style != "concat":
            raise LayoutError(f"packed_qkv: style '{style}' needs the number of heads. Pass config or num_heads=.")
        return None, 1
    num_heads, num_key_value_heads = heads
    if style == "per_head" and num_heads != num_key_value_heads:
        raise LayoutError(
            f"packed_qkv: style 'per_head' needs as many key heads as query heads, got {num_heads} query heads and "
            f"{num_key_value_heads} key heads. Use style='per_group'."
        )
    per_key_head = num_heads // num_key_value_heads
    return (per_key_head, 1, 1), 1 if style == "concat" else num_key_value_heads


def _modules(names: str | Sequence[str] | None, dst: str | None) -> list[tuple[Sequence[str], str]]:
    if names is None:
        if dst is not None:
            raise LayoutError(f"packed_qkv: dst='{dst}' needs names= as well, 'llama', 'bert' or three module names.")
        return list(NAMES.values())
    if isinstance(names, str):
        if names not in NAMES:
            raise LayoutError(
                f"packed_qkv: names '{names}' is not known. Use {' or '.join(map(repr, NAMES))}, "
                "or give three module names."
            )
        separate, packed = NAMES[names]
        return [(separate, dst or packed)]
    if len(names) != 3 or dst is None:
        raise LayoutError(f"packed_qkv: names= needs three module names and dst=, got {list(names)} and dst={dst!r}.")
    return [(tuple(names), dst)]
