"""Merged experts in place of one module for each expert."""

from __future__ import annotations

from hf_stream.checkpoint.config import config_of
from hf_stream.errors import LayoutError
from hf_stream.layouts.from_config import ExpertCount, FromConfig
from hf_stream.layouts.joining import Concat, Stack
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.naming import Rename
from hf_stream.layouts.rule import Rule

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

    Biases, where there are some, become `gate_up_proj_bias` [E, 2I] and `down_proj_bias` [E, H], as transformers calls
    them.

        >>> import torch
        >>> shapes = {"gate": (6, 4), "up": (6, 4), "down": (4, 6)}
        >>> split = {
        ...     f"layers.0.mlp.experts.{e}.{x}_proj.weight": torch.empty(shapes[x]) for e in range(8) for x in shapes
        ... }
        >>> {name: list(tensor.shape) for name, tensor in stacked_experts()(split).items()}
        {'layers.0.mlp.experts.gate_up_proj': [8, 12, 4], 'layers.0.mlp.experts.down_proj': [8, 4, 6]}

    Args:
        config: The model's config, an object or a dict, its path, or the model; the number of experts is read from it.
            Default: the one beside the checkpoint, or that of the model, where there is one.
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
    count: int | FromConfig | None = num_experts or ExpertCount()
    if isinstance(count, FromConfig) and config is not None:
        count = count.arguments(config_of(config))["count"]
    separate, merged = f"{{prefix:*}}.{block}.experts.{{expert}}", "{prefix:*}.mlp.experts"
    stack: list[Rule] = []
    join: list[Rule] = []
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        # Few models have biases there.
        optional = kind == "bias"
        for module, name in ((gate, "gate_proj"), (up, "up_proj"), (down, "down_proj")):
            rule = Stack(f"{separate}.{module}.{kind}", f"{merged}.{name}{suffix}", count=count, optional=optional)
            stack.append(rule)
        halves = [f"{merged}.{name}{suffix}" for name in ("gate_proj", "up_proj")]
        join.append(Concat(halves, f"{merged}.gate_up_proj{suffix}", dim=1, optional=optional))
    if block != "mlp":
        stack.append(Rename(f"{{prefix:*}}.{block}.gate.weight", "{prefix}.mlp.gate.weight"))
    return Layout(stack) | Layout(join)
