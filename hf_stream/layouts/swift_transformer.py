"""The partitions of SwiftTransformer, from OPT and Llama as metaseq, Meta or transformers name them, and back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from hf_stream.checkpoint.config import config_of
from hf_stream.checkpoint.mapping import TORCHSCRIPT, FileFormat
from hf_stream.errors import LayoutError
from hf_stream.layouts.composable import Composable
from hf_stream.layouts.meta_llama import META_LLAMA_PARTS, meta_llama
from hf_stream.layouts.metaseq_opt import metaseq_opt
from hf_stream.layouts.sizes import config_size, known_heads
from hf_stream.layouts.swift_names import META_NAMES, check_names, check_shapes, named_opt, origin, whole_opt
from hf_stream.layouts.swift_partitions import LAYER, Heads, divide, join

logger = logging.getLogger(__name__)

_LOADER_TP: Final = 8  # the number of partitions that SwiftTransformer's own loader expects


def swift_transformer(
    tp: int = 8,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    config: object = None,
) -> Composable:
    """OPT and Llama 2 as SwiftTransformer loads them, divided into `tp` partitions.

    Takes checkpoints of metaseq or Meta, in one file or in parts, and those of transformers; names tell which it is.
    Partition i has q_i query heads and k_i key and value heads of d rows. With hidden size H and ffn size F:

        decoder.layers.N.                      a partition, `.tp_i`   whole weight (metaseq; Meta)
          self_attn.qkv_proj.weight            [H, q_i + 2 k_i, d]    qkv_proj [3H, H]; wq, wk, wv; transposed
          self_attn.qkv_proj.bias              [q_i + 2 k_i, d]       qkv_proj.bias [3H]
          self_attn.out_proj.weight            [H / tp, H]            out_proj; wo; transposed
          fc1.weight, fc3.weight               [F / tp, H]            fc1; w1, w3
          fc1.bias                             [F / tp]               fc1.bias
          fc2.weight                           [H, F / tp]            fc2; w2

    Norms, embeddings and other biases stay whole. Heads that do not divide by `tp` go to the last partition. OPT's
    embedding of positions loses its first two rows, which no token uses, and its output projection is a copy of the
    embedding. The rows of Llama's heads are in Meta's order. Nothing is computed: values are as they were.

    `convert` writes this layout as SwiftTransformer's own files, one for each tensor, unless told otherwise. The
    inverse gives the names of transformers; the two rows come back as zeros.

    Args:
        tp: Number of partitions. SwiftTransformer's own loader takes 8.
        heads: Number of query heads; overrides the config.
        kv_heads: Number of key heads; overrides the config.
        head_dim: Rows of a head; overrides the config. Where nobody tells, it is guessed as SwiftTransformer's
            converter does: for OPT 64 with an ffn size up to 8192, 80 with one of 10240, else 128; for Llama 128.
        config: The model's config (or the content of Meta's params.json), an object or a dict, or its path. Default:
            the one beside the checkpoint.

    Raises:
        LayoutError: `tp` is less than 1. When the layout is called: names are missing or have no place in
            SwiftTransformer (OPT-350M), heads do not suit the tensors, or a weight does not divide by `tp`.
    """
    if tp < 1:
        raise LayoutError(f"tp must be at least 1, got {tp}.")
    config = config_of(config)
    query, key = known_heads(config, heads, kv_heads)
    return SwiftTransformer(tp, query, key, head_dim or config_size(config, "head_dim"))


@dataclass(frozen=True, repr=False)
class SwiftTransformer(Composable):
    """What `swift_transformer` gives."""

    tp: int
    heads: int | None
    kv_heads: int | None
    head_dim: int | None

    file_format: ClassVar[FileFormat] = TORCHSCRIPT

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        family, whole = self._whole(tensors)
        check_names(family, whole)
        check_shapes(whole)
        return divide(whole, self.tp, self._heads(family, whole))

    @property
    def needs_config(self) -> bool:
        return self.heads is None

    def with_config(self, config: object) -> SwiftTransformer:
        heads, kv_heads = known_heads(config, self.heads, self.kv_heads)
        dim = self.head_dim or config_size(config, "head_dim")
        return dataclasses.replace(self, heads=heads, kv_heads=kv_heads, head_dim=dim)

    @property
    def inverse(self) -> FromSwiftTransformer:
        return FromSwiftTransformer(self)

    def check_files(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Warn of what SwiftTransformer's own loader does not take, once it is known what is to be written."""
        dtypes = {tensor.dtype for tensor in tensors.values()} - {torch.float16, torch.float32}
        if dtypes:
            listed = ", ".join(sorted(map(str, dtypes)))
            logger.warning("SwiftTransformer loads float16 and float32 only, and %s is to be written", listed)
        if self.tp != _LOADER_TP:
            logger.warning("SwiftTransformer loads %d partitions, and %d are to be written", _LOADER_TP, self.tp)
        qkv = LAYER.format(0) + "self_attn.qkv_proj.weight.tp_{}"
        numbers = [tensors[qkv.format(i)].shape[-2] for i in range(self.tp) if qkv.format(i) in tensors]
        if len(set(numbers)) > 1:
            logger.warning(
                "the heads do not divide by %d (the partitions have %s of them): SwiftTransformer loads such a model "
                "on a single GPU only",
                self.tp,
                ", ".join(map(str, numbers)),
            )

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> tuple[str, dict[str, torch.Tensor]]:
        """Family, and weights by SwiftTransformer's names, before anything is divided or transposed."""
        match origin(tensors):
            case "metaseq":
                # An output projection of its own is of no use, and need not suit the embedding.
                kept = {name: t for name, t in tensors.items() if not name.startswith("decoder.output_projection.")}
                return "OPT", whole_opt(metaseq_opt()(kept))
            case "OPT":
                return "OPT", whole_opt(tensors)
            case "Meta":
                return "Llama", META_NAMES.with_matches(META_LLAMA_PARTS.merge(tensors))[0]
            case _:
                query = next(t for name, t in tensors.items() if name.endswith(".self_attn.q_proj.weight"))
                key = next(t for name, t in tensors.items() if name.endswith(".self_attn.k_proj.weight"))
                heads = self._heads_of("Llama", query.shape[0], key.shape[0], 0)
                meta = meta_llama(num_heads=heads.query, num_key_value_heads=heads.key).inverse(tensors)
                return "Llama", META_NAMES.with_matches(meta)[0]

    def _heads(self, family: str, whole: Mapping[str, torch.Tensor]) -> Heads:
        query, key, fc1 = (
            whole[f"{LAYER.format(0)}{x}.weight"] for x in ("self_attn.q_proj", "self_attn.k_proj", "fc1")
        )
        return self._heads_of(family, query.shape[0], key.shape[0], fc1.shape[0])

    def _heads_of(self, family: str, query_rows: int, key_rows: int, ffn: int) -> Heads:
        dim = self.head_dim or (query_rows // self.heads if self.heads else _guessed_dim(family, ffn))
        heads = Heads(query_rows // dim, key_rows // dim, dim)
        for what, rows, number, wanted in (
            ("query", query_rows, heads.query, self.heads),
            ("key", key_rows, heads.key, self.kv_heads),
        ):
            if rows % dim or not number or wanted not in (None, number):
                told = f"{wanted} heads" if wanted else "heads"
                raise LayoutError(
                    f"swift_transformer: {rows} {what} rows are not {told} of {dim}. Check heads=, kv_heads= and "
                    "head_dim=, or the config."
                )
        return heads

    def __repr__(self) -> str:
        told = {name: getattr(self, name) for name in ("heads", "kv_heads", "head_dim")}
        words = [str(self.tp), *(f"{name}={value}" for name, value in told.items() if value is not None)]
        return f"swift_transformer({', '.join(words)})"


@dataclass(frozen=True, repr=False)
class FromSwiftTransformer(Composable):
    """The inverse of `swift_transformer`: the names of transformers."""

    forward: SwiftTransformer

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        whole, heads = join(tensors, self.forward.tp)
        family = "Llama" if LAYER.format(0) + "fc3.weight" in whole else "OPT"
        check_names(family, whole)
        check_shapes(whole)
        if family == "Llama":
            to_hf = meta_llama(num_heads=heads.query, num_key_value_heads=heads.key)
            return to_hf(META_NAMES.inverse.with_matches(whole)[0])
        return named_opt(whole)

    @property
    def inverse(self) -> SwiftTransformer:
        return self.forward

    def __repr__(self) -> str:
        return f"{self.forward!r}.inverse"


def _guessed_dim(family: str, ffn: int) -> int:
    """As SwiftTransformer's converter guesses."""
    if family == "Llama" or ffn > 8192:
        return 80 if ffn == 10240 and family == "OPT" else 128
    return 64
