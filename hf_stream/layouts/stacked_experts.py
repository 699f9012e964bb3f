"""Merged experts in place of one module for each expert."""

from __future__ import annotations

from hf_stream.errors import LayoutError
from hf_stream.layouts.joining import Concat, Stack
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.naming import Rename
from hf_stream.layouts.rule import Rule
from hf_stream.layouts.sizes import config_size

NAMES: dict[str, tuple[str, tuple[str, str, str]]] = {
    "qwen": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
"""The module that holds gate and experts, and each expert's gate, up and down projections, by family of models."""


def stacked_experts(config: object = None, *, names: str = "qwen", num_experts: int | None = None) -> Layout:
    """Merge the experts of a mixture as transformers 5 holds them.

    E experts, hidden size H, expert size I:

        mlp.experts.{expert}.gate_proj.weight  E x [I, H]
        mlp.experts.{expert}.up_proj.weight    E x [I, H]  ->  mlp.experts.gate_up_proj  [E, 2I, H]
        mlp.experts.{expert}.down_proj.weight  E x [H, I]  ->  mlp.experts.down_proj     [E, H, I]

        >>> import torch
        >>> shapes = {"gate": (6, 4), "up": (6, 4), "down": (4, 6)}
        >>> split = {
        ...     f"layers.0.mlp.experts.{e}.{x}_proj.weight": torch.empty(shapes[x]) for e in range(8) for x in shapes
        ... }
        >>> {name: list(tensor.shape) for name, tensor in stacked_experts()(split).items()}
        {'layers.0.mlp.experts.gate_up_proj': [8, 12, 4], 'layers.0.mlp.experts.down_proj': [8, 4, 6]}

    Args:
        config: The model's config, an object or a dict; the number of experts is read from it.
        names: How the experts' modules are called: "qwen" (also DeepSeek, GLM and others), or "mixtral", whose
            `block_sparse_moe` becomes `mlp` as well.
        num_experts: Overrides the config. Without either, whatever is there is merged, and in a stream the merged
            tensors come at the end; with it, missing experts are an error even where they are the last.

    Raises:
        LayoutError: `names` is not known.
    """
    if names not in NAMES:
        raise LayoutError(f"stacked_experts: names '{names}' is not known. Use {' or '.join(map(repr, NAMES))}.")
    block, (gate, up, down) = NAMES[names]
    count = num_experts or config_size(config, "num_experts", "num_local_experts", "n_routed_experts")
    separate = f"{{prefix:*}}.{block}.experts.{{expert}}"
    merged = "{prefix:*}.mlp.experts"
    stack: list[Rule] = [
        Stack(f"{separate}.{gate}.weight", f"{merged}.gate_proj", count=count),
        Stack(f"{separate}.{up}.weight", f"{merged}.up_proj", count=count),
        Stack(f"{separate}.{down}.weight", f"{merged}.down_proj", count=count),
    ]
    if block != "mlp":
        stack.append(Rename(f"{{prefix:*}}.{block}.gate.weight", "{prefix}.mlp.gate.weight"))
    join = Concat([f"{merged}.gate_proj", f"{merged}.up_proj"], f"{merged}.gate_up_proj", dim=1)
    return Layout(stack) | Layout([join])
