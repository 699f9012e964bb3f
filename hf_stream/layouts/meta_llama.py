"""Llama as Meta gives it out, in one file or in parts, to the names and rows of transformers and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_stream.checkpoint.config import config_of
from hf_stream.errors import LayoutError
from hf_stream.layouts.composable import Composable
from hf_stream.layouts.layout import Layout
from hf_stream.layouts.naming import Rename
from hf_stream.layouts.parts import PartRule, Parts, Pieces
from hf_stream.layouts.rule import shape_text
from hf_stream.layouts.sizes import known_heads

_EMBEDDING = "tok_embeddings.weight"
_NORM = "norm.weight"
_OUTPUT = "output.weight"
_FREQS = "rope.freqs"
_LAYER = "layers.{layer:int}"
_HF_EMBEDDING = "model.embed_tokens.weight"
_HF_OUTPUT = "lm_head.weight"
_QUERY, _KEY = ".attention.wq.weight", ".attention.wk.weight"


def _dim_of_embedding(pieces: Mapping[str, Pieces]) -> int:
    """Llama 2 cuts the columns of the embedding; Llama 3 the rows, so that a part has as many columns as a norm."""
    norm, columns = pieces.get(_NORM), pieces[_EMBEDDING][0].shape[-1:]
    return 0 if norm and columns == norm[0].shape else 1


META_LLAMA_PARTS = Parts(
    "Meta's Llama",
    [
        PartRule(
            (f"{_LAYER}.attention.{{x:wq|wk|wv}}.weight", f"{_LAYER}.feed_forward.{{x:w1|w3}}.weight", _OUTPUT), 0
        ),
        PartRule((f"{_LAYER}.attention.wo.weight", f"{_LAYER}.feed_forward.w2.weight"), 1),
        PartRule((_EMBEDDING,), 1, dim_of=_dim_of_embedding),
        PartRule((_NORM, f"{_LAYER}.{{norm:attention_norm|ffn_norm}}.weight"), None),
    ],
    dropped=[_FREQS, f"{_LAYER}.attention.inner_attention.rope.freqs"],
)
"""All names of Meta's Llama, and how its parts are divided. Rows of wq and wk: the rotated pairs side by side."""

_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NAMES = Layout(
    [
        Rename(_EMBEDDING, _HF_EMBEDDING),
        *(Rename(f"{_LAYER}.{meta}.weight", f"model.{_LAYER}.{hf}.weight") for meta, hf in _MODULES.items()),
        Rename(_NORM, "model.norm.weight"),
        Rename(_OUTPUT, _HF_OUTPUT),
    ]
)


def meta_llama(
    config: object = None,
    *,
    num_heads: int | None = None,
    num_key_value_heads: int | None = None,
    parts: int | None = None,
) -> Composable:
    """Llama checkpoints of Meta as transformers names them, with the rows of queries and keys in its order.

    With hidden size H, ffn size F, vocabulary V, n heads of d rows, k key heads, P parts:

        Meta                                one of P parts    transformers
        tok_embeddings.weight               [V, H/P]          model.embed_tokens.weight  [V, H]
        layers.N.attention.wq.weight        [nd/P, H]         self_attn.q_proj.weight    [nd, H], other order
        layers.N.attention.wk.weight        [kd/P, H]         self_attn.k_proj.weight    [kd, H], other order
        layers.N.attention.wv.weight        [kd/P, H]         self_attn.v_proj.weight    [kd, H]
        layers.N.attention.wo.weight        [H, nd/P]         self_attn.o_proj.weight    [H, nd]
        layers.N.feed_forward.w1, w3        [F/P, H]          mlp.gate_proj, up_proj     [F, H]
        layers.N.feed_forward.w2            [H, F/P]          mlp.down_proj              [H, F]
        output.weight                       [V/P, H]          lm_head.weight             [V, H]

    Norms are whole in every part; frequencies of the rotary embedding are left out. The two numbers that the rotary
    embedding turns together stand side by side in a head of Meta's (0 1, 2 3, ...), and half a head apart in
    transformers (0 d/2, 1 d/2+1, ...). So the rows of a head change places: only the rows of a head must be known. They
    are `rope.freqs` twice, if that is there; otherwise numbers of heads are needed.

    Parts are `name.part_0`, `name.part_1` and so on, as `open_checkpoint` names them. Nothing is computed. The inverse
    gives what one file of Meta holds, or `parts` of them, cut as Llama 2 is; output.weight is then there even if
    transformers tied it.

        >>> import torch
        >>> wq = {"layers.0.attention.wq.weight": torch.tensor([[0], [1], [2], [3], [10], [11], [12], [13]])}
        >>> meta_llama(num_heads=2)(wq)["model.layers.0.self_attn.q_proj.weight"].flatten()
        tensor([ 0,  2,  1,  3, 10, 12, 11, 13])

    Args:
        config: The content of Meta's params.json, or of config.json, or any object with attributes, or the path of
            either file; heads are read from it. Default: the one beside the checkpoint.
        num_heads: Number of query heads; overrides the config.
        num_key_value_heads: Number of key heads; overrides the config. It is only checked: the tensors tell it as well.
        parts: How many parts the inverse makes; parts that are opened must be as many. Default: the inverse gives one
            file's names, and any number may be opened.

    Raises:
        LayoutError: parts is less than 1. When the layout is called: a name is not one of Llama's, parts are missing,
            heads are not known or do not suit the tensors, or a tensor cannot be cut into that many parts.
    """
    if parts is not None and parts < 1:
        raise LayoutError(f"parts must be at least 1, got {parts}.")
    return MetaLlama(*known_heads(config_of(config), num_heads, num_key_value_heads), parts)


@dataclass(frozen=True, repr=False)
class MetaLlama(Composable):
    """What `meta_llama` gives, and its inverse."""

    num_heads: int | None
    num_key_value_heads: int | None
    parts: int | None
    backwards: bool = False

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._to_meta(tensors) if self.backwards else self._to_hf(tensors)

    @property
    def needs_config(self) -> bool:
        return self.num_heads is None

    def with_config(self, config: object) -> MetaLlama:
        heads, kv_heads = known_heads(config, self.num_heads, self.num_key_value_heads)
        return dataclasses.replace(self, num_heads=heads, num_key_value_heads=kv_heads)

    @property
    def inverse(self) -> MetaLlama:
        return dataclasses.replace(self, backwards=not self.backwards)

    def _to_hf(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        whole = META_LLAMA_PARTS.merge(tensors, self.parts)
        _check_columns(whole)
        freqs = tensors.get(_FREQS, tensors.get(f"{_FREQS}.part_0"))
        named, _ = _NAMES.with_matches(self._turned(whole, None if freqs is None else 2 * freqs.numel()))
        return named

    def _to_meta(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if _HF_OUTPUT not in tensors and _HF_EMBEDDING in tensors:
            # Meta's code knows no tied weights.
            tensors = {**tensors, _HF_OUTPUT: tensors[_HF_EMBEDDING]}
        whole = {name: t for name, t in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
        named, _ = _NAMES.inverse.with_matches(whole)
        for what, heads in (("num_heads", self.num_heads), ("num_key_value_heads", self.num_key_value_heads)):
            if heads is not None and heads % (self.parts or 1):
                raise LayoutError(f"{what}={heads} cannot be shared out among {self.parts} parts. Change parts=.")
        unknown = [name for name in named if name in whole]
        if unknown:
            raise META_LLAMA_PARTS.unknown(unknown, "transformers' Llama")
        return META_LLAMA_PARTS.cut(self._turned(named, None), self.parts)

    def _turned(self, tensors: Mapping[str, torch.Tensor], head_dim: int | None) -> dict[str, torch.Tensor]:
        """With the rows of queries and keys, which have Meta's names, in the other order."""
        results = dict(tensors)
        for name, weight in tensors.items():
            if name.endswith(_QUERY):
                results[name] = self._reordered(name, weight, self._head_dim(name, weight, head_dim))
            elif name.endswith(_KEY):
                query_name = name.removesuffix(_KEY) + _QUERY
                if query_name not in tensors:
                    raise LayoutError(f"'{query_name}' is missing beside '{name}'. Add it.")
                rows, heads = self._head_dim(query_name, tensors[query_name], head_dim), self.num_key_value_heads
                if heads is not None and weight.shape[0] != heads * rows:
                    raise LayoutError(
                        f"'{name}' has shape {shape_text(weight)}; {heads} key heads of {rows} rows are "
                        f"{heads * rows} rows. Check the numbers of heads, and that all parts are open."
                    )
                results[name] = self._reordered(name, weight, rows)
        return results

    def _head_dim(self, name: str, query: torch.Tensor, head_dim: int | None) -> int:
        """Rows of a head: what is known, if all that is known agrees."""
        heads = self.num_heads
        if heads is None and head_dim is None:
            raise LayoutError(
                f"'{name}': the number of heads is not known. Pass config= or num_heads=, or put params.json or "
                "config.json beside the source."
            )
        if heads is not None and (query.shape[0] % heads or head_dim not in (None, query.shape[0] // heads)):
            told = "" if head_dim is None else f" of {head_dim} rows, as {_FREQS} tells"
            raise LayoutError(
                f"'{name}' has shape {shape_text(query)}, which are not {heads} heads{told}. "
                "Check num_heads, and that all parts are open."
            )
        return query.shape[0] // (heads or 1) if head_dim is None else head_dim

    def _reordered(self, name: str, weight: torch.Tensor, head_dim: int) -> torch.Tensor:
        if head_dim < 2 or head_dim % 2 or weight.shape[0] % head_dim:
            raise LayoutError(
                f"'{name}' has shape {shape_text(weight)}, which cannot be heads of {head_dim} rows with two halves "
                "each. Check num_heads."
            )
        pairs = (2, head_dim // 2) if self.backwards else (head_dim // 2, 2)
        heads = weight.shape[0] // head_dim
        return weight.reshape(heads, *pairs, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in ("num_heads", "num_key_value_heads", "parts")}
        words = ", ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        return f"meta_llama({words})" + ".inverse" * self.backwards


def _check_columns(tensors: Mapping[str, torch.Tensor]) -> None:
    """A part that was not opened shows here."""
    embedding, norm = tensors.get(_EMBEDDING), tensors.get(_NORM)
    if embedding is not None and norm is not None and embedding.shape[1:] != norm.shape:
        raise LayoutError(
            f"'{_EMBEDDING}' has shape {shape_text(embedding)} with all parts joined, and '{_NORM}' "
            f"{shape_text(norm)}: as many columns wanted. Open all parts of the checkpoint."
        )
