"""One packed projection in place of the separate gate and up projections of a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence

from hf_stream.errors import LayoutError
from hf_stream.layouts.joining import Concat
from hf_stream.layouts.layout import Layout


def packed_gate_up(*, names: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj"), dst: str = "mlp.gate_up_proj") -> Layout:
    """Pack gate and up projections, weights and biases: gate first, as Phi-3 has it.

        >>> import torch
        >>> separate = {f"layers.0.mlp.{x}_proj.weight": torch.empty(64, 16) for x in ("gate", "up")}
        >>> {name: list(tensor.shape) for name, tensor in packed_gate_up()(separate).items()}
        {'layers.0.mlp.gate_up_proj.weight': [128, 16]}

    Args:
        names: The ends of the names of the gate module and the up module.
        dst: The end of the packed module's name.
    """
    if isinstance(names, str) or len(names) != 2:
        raise LayoutError(f"packed_gate_up: names= needs the names of two modules, got {names!r}.")
    srcs = [f"{{prefix:*}}.{module}.{{kind:weight|bias}}" for module in names]
    return Layout([Concat(srcs, f"{{prefix}}.{dst}.{{kind}}")])
