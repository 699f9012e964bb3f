"""OPT as metaseq keeps it, in one file or in parts, to the names of transformers and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts.composable import Composable
from hf_stream.layouts.joining import Split
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.naming import Rename
from hf_stream.layouts.parts import PartRule, Parts, Pieces, same_memory
from hf_stream.layouts.rule import shape_text

_EMBEDDING = "decoder.embed_tokens.weight"
_OUTPUT = "decoder.output_projection.weight"
_LAYER = "decoder.layers.{layer:int}"
_HF_PREFIX = "model."
_QKV = ".self_attn.qkv_proj.weight"


def _dim_of_output(pieces: Mapping[str, Pieces]) -> int | None:
    """An output projection that is tied is cut as the embedding is; one of its own is whole in every part."""
    embedding, output = pieces.get(_EMBEDDING), pieces[_OUTPUT]
    return 0 if embedding and len(embedding) > 1 and embedding[0].shape == output[0].shape else None


METASEQ_OPT_PARTS = Parts(
    "metaseq's OPT",
    [
        PartRule((f"{_LAYER}.self_attn.qkv_proj.{{kind:weight|bias}}",), 0, blocks=3),
        PartRule((_EMBEDDING, f"{_LAYER}.fc1.{{kind:weight|bias}}", f"{_LAYER}.ffn_layernorm.{{kind:weight|bias}}"), 0),
        PartRule((f"{_LAYER}.fc2.weight", f"{_LAYER}.self_attn.out_proj.weight"), 1),
        PartRule(
            (
                "decoder.embed_positions.weight",
                "decoder.layer_norm.{kind:weight|bias}",
                "decoder.{side:project_in_dim|project_out_dim}.weight",
                f"{_LAYER}.{{norm:self_attn_layer_norm|final_layer_norm}}.{{kind:weight|bias}}",
                f"{_LAYER}.fc2.bias",
                f"{_LAYER}.self_attn.out_proj.bias",
            ),
            None,
        ),
        PartRule((_OUTPUT,), None, dim_of=_dim_of_output),
    ],
    dropped=["decoder.version"],
)
"""All names of metaseq's OPT, and how its parts are divided. Query, key and value stand as key, value, query."""

_NAMES = Layout(
    [
        Split(
            f"{_LAYER}.self_attn.qkv_proj.{{kind:weight|bias}}",
            [f"model.{_LAYER}.self_attn.{x}_proj.{{kind}}" for x in "kvq"],
        ),
        Rename(f"{_LAYER}.self_attn.out_proj.{{kind:weight|bias}}", f"model.{_LAYER}.self_attn.out_proj.{{kind}}"),
        Rename(
            f"{_LAYER}.{{module:fc1|fc2|self_attn_layer_norm|final_layer_norm}}.{{kind:weight|bias}}",
            f"model.{_LAYER}.{{module}}.{{kind}}",
        ),
        Rename("decoder.{table:embed_tokens|embed_positions}.weight", "model.decoder.{table}.weight"),
        Rename("decoder.layer_norm.{kind:weight|bias}", "model.decoder.final_layer_norm.{kind}"),
        Rename("decoder.{side:project_in|project_out}_dim.weight", "model.decoder.{side}.weight"),
        Rename(_OUTPUT, "lm_head.weight"),
    ]
)


def metaseq_opt(*, parts: int | None = None) -> Composable:
    """OPT checkpoints of metaseq as transformers names them.

    Hidden size H, ffn size F, vocabulary V, P parts:

        metaseq                                       one of P parts       transformers
        decoder.layers.N.self_attn.qkv_proj.weight    [3, H/P, H] flat     k_proj, v_proj, q_proj  each [H, H]
        decoder.layers.N.fc1.weight                   [F/P, H]             fc1.weight  [F, H]
        decoder.layers.N.fc2.weight                   [H, F/P]             fc2.weight  [H, F]
        decoder.layers.N.self_attn.out_proj.weight    [H, H/P]             out_proj.weight  [H, H]
        decoder.embed_tokens.weight                   [V/P, H]             model.decoder.embed_tokens.weight  [V, H]
        decoder.layer_norm.weight                     [H]                  model.decoder.final_layer_norm.weight  [H]
        decoder.output_projection.weight                                   lm_head.weight, unless it is tied

    Norms, embeddings of positions (with their two extra rows, which transformers keeps as well) and the biases of
    out_proj and fc2 are whole in every part. `decoder.version` is left out. A tensor is `name`, or in parts
    `name.part_0`, `name.part_1` and so on, as `open_checkpoint` names them. All sizes are read from the tensors, and
    nothing is computed. The inverse gives what one file of metaseq holds, or `parts` of them.

        >>> import torch
        >>> layer = "decoder.layers.0.self_attn.qkv_proj.bias"
        >>> part = {f"{layer}.part_{i}": torch.tensor([10, 20, 30]) + i for i in range(2)}
        >>> for name, tensor in metaseq_opt()(part).items():
        ...     print(name, tensor.tolist())
        model.decoder.layers.0.self_attn.k_proj.bias [10, 11]
        model.decoder.layers.0.self_attn.v_proj.bias [20, 21]
        model.decoder.layers.0.self_attn.q_proj.bias [30, 31]

    Args:
        parts: How many parts the inverse makes; parts that are opened must be as many. Default: the inverse gives one
            file's names, and any number may be opened.

    Raises:
        LayoutError: parts is less than 1. When the layout is called: a name is not one of OPT's, parts are missing, or
            a tensor cannot be cut into that many.
    """
    if parts is not None and parts < 1:
        raise LayoutError(f"parts must be at least 1, got {parts}.")
    return MetaseqOpt(parts)


@dataclass(frozen=True, repr=False)
class MetaseqOpt(Composable):
    """What `metaseq_opt` gives, and its inverse."""

    parts: int | None
    backwards: bool = False

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._to_metaseq(tensors) if self.backwards else self._to_hf(tensors)

    @property
    def inverse(self) -> MetaseqOpt:
        return dataclasses.replace(self, backwards=not self.backwards)

    def _to_hf(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        whole = METASEQ_OPT_PARTS.merge(_untied(tensors), self.parts)
        for name, tensor in whole.items():
            if name.endswith(_QKV):
                _check_square(name, tensor)
        named, _ = _NAMES.with_matches(whole)
        unknown = [name for name in named if name in whole]
        if unknown:
            raise METASEQ_OPT_PARTS.unknown(unknown, "transformers' OPT")
        return named

    def _to_metaseq(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not any(name.startswith(_HF_PREFIX) for name in tensors):
            # The decoder alone, as some checkpoints on the Hub have it.
            tensors = {_HF_PREFIX * name.startswith("decoder.") + name: tensor for name, tensor in tensors.items()}
        head, embedding = tensors.get("lm_head.weight"), tensors.get(_HF_PREFIX + _EMBEDDING)
        if head is not None and embedding is not None and same_memory(head, embedding):
            tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        named, _ = _NAMES.inverse.with_matches(tensors)
        return METASEQ_OPT_PARTS.cut(named, self.parts)

    def __repr__(self) -> str:
        parts = "" if self.parts is None else f"parts={self.parts}"
        return f"metaseq_opt({parts})" + ".inverse" * self.backwards


def _untied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without an output projection that is the embedding itself: transformers ties them again."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(_OUTPUT)
        or (embedding := tensors.get(name.replace(_OUTPUT, _EMBEDDING))) is None
        or not same_memory(tensor, embedding)
    }


def _check_square(name: str, weight: torch.Tensor) -> None:
    """A part that was not opened shows here only: less rows, and as many columns."""
    if weight.ndim != 2 or weight.shape[0] != 3 * weight.shape[1]:
        raise LayoutError(
            f"'{name}' has shape {shape_text(weight)} with all parts joined, not three times as many rows as columns. "
            "Open all parts of the checkpoint."
        )
