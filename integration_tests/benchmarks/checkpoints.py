"""Seeded checkpoints for the benchmarks: the same bytes on every machine, in the sharded layout of the Hub.

At scale 1: `qwen3-moe` is a Qwen3-MoE of 3.4 GB with 64 experts in each of 16 layers (3219 tensors, one per expert and
projection), `llama` a Llama of 2.2 GB with 4 key/value heads for 32 query heads; both bfloat16. `metaseq-opt` is an OPT
of 2.6 GB (1.3 billion numbers, float16) as metaseq keeps it, in 8 parts. A smaller scale shrinks layers, widths and
vocabulary together, and the number of bytes about in proportion.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MAX_SHARD_NBYTES = 1_000_000_000
HEAD_DIM = 64
OPT_PARTS = 8

Shape = tuple[int, ...]
Config = dict[str, Any]


def make(kind: str, scale: float, data: Path) -> Path:
    """Return the directory of a checkpoint, writing it first if it is not there yet.

    Args:
        kind: `"qwen3-moe"`, `"llama"` or `"metaseq-opt"`.
        scale: Size relative to the full checkpoint, 0 < scale <= 1.
        data: Directory that holds all benchmark data.

    Returns:
        A directory with config.json, shards of at most 1 GB and their index; of `metaseq-opt`, with its parts.
    """
    directory = data / f"{kind}-{scale:g}"
    if not directory.exists():
        unfinished = directory.with_name(f"{directory.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if kind == "metaseq-opt":
            _write_opt_parts(scale, unfinished)
        else:
            make_config, shapes = _KINDS[kind]
            config = make_config(scale)
            (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            _write_shards(list(shapes(config)), unfinished)
        unfinished.rename(directory)
    return directory


def _qwen3_moe_config(scale: float) -> Config:
    hidden = _shrunk(1024, scale, HEAD_DIM)
    heads = hidden // HEAD_DIM
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": _shrunk(16, scale, 1),
        "num_attention_heads": heads,
        # At full scale a fourth; always a divisor.
        "num_key_value_heads": next(n for n in range(max(1, heads // 4), 0, -1) if heads % n == 0),
        "head_dim": HEAD_DIM,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": _shrunk(512, scale, 32),
        "intermediate_size": _shrunk(2048, scale, 32),
        "vocab_size": _shrunk(32000, scale, 64),
        "tie_word_embeddings": False,
    }


def _qwen3_moe_shapes(config: Config) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _attention_shapes(config, prefix)
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, inner)
    yield from _outer_shapes(config)


def _llama_config(scale: float) -> Config:
    hidden = _shrunk(2048, scale, 2 * HEAD_DIM)
    heads = hidden // HEAD_DIM
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": _shrunk(22, scale, 1),
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 8),
        "head_dim": HEAD_DIM,
        "intermediate_size": _shrunk(5632, scale, 64),
        "vocab_size": _shrunk(32000, scale, 64),
        "tie_word_embeddings": False,
    }


def _llama_shapes(config: Config) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _attention_shapes(config, prefix)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield from _outer_shapes(config)


def _attention_shapes(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden = config["hidden_size"]
    query, key = config["num_attention_heads"] * HEAD_DIM, config["num_key_value_heads"] * HEAD_DIM
    yield f"{prefix}.self_attn.q_proj.weight", (query, hidden)
    yield f"{prefix}.self_attn.k_proj.weight", (key, hidden)
    yield f"{prefix}.self_attn.v_proj.weight", (key, hidden)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def _outer_shapes(config: Config) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (config["vocab_size"], config["hidden_size"])
    yield "model.norm.weight", (config["hidden_size"],)
    yield "lm_head.weight", (config["vocab_size"], config["hidden_size"])


def _write_opt_parts(scale: float, directory: Path) -> None:
    """Write what each of 8 processes of metaseq holds: `reshard-model_part-0.pt` to `reshard-model_part-7.pt`."""
    hidden, layers = _shrunk(2048, scale, HEAD_DIM), _shrunk(24, scale, 1)
    vocab, positions, inner = _shrunk(50272, scale, OPT_PARTS), 2050, 4 * hidden
    cut, cut_inner = hidden // OPT_PARTS, inner // OPT_PARTS
    shapes: dict[str, Shape] = {
        "decoder.embed_tokens.weight": (vocab // OPT_PARTS, hidden),
        "decoder.embed_positions.weight": (positions, hidden),
    }
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}"
        shapes[f"{prefix}.self_attn.qkv_proj.weight"] = (3 * cut, hidden)
        shapes[f"{prefix}.self_attn.qkv_proj.bias"] = (3 * cut,)
        shapes[f"{prefix}.self_attn.out_proj.weight"] = (hidden, cut)
        shapes[f"{prefix}.self_attn.out_proj.bias"] = (hidden,)
        shapes[f"{prefix}.fc1.weight"] = (cut_inner, hidden)
        shapes[f"{prefix}.fc1.bias"] = (cut_inner,)
        shapes[f"{prefix}.fc2.weight"] = (hidden, cut_inner)
        shapes[f"{prefix}.fc2.bias"] = (hidden,)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{prefix}.{norm}.{kind}": (hidden,) for kind in ("weight", "bias")}
    shapes |= {f"decoder.layer_norm.{kind}": (hidden,) for kind in ("weight", "bias")}
    for part in range(OPT_PARTS):
        model = {name: _values(f"{name} of part {part}", shape).half() for name, shape in shapes.items()}
        torch.save({"model": model}, directory / f"reshard-model_part-{part}.pt")


_KINDS: dict[str, tuple[Callable[[float], Config], Callable[[Config], Iterator[tuple[str, Shape]]]]] = {
    "qwen3-moe": (_qwen3_moe_config, _qwen3_moe_shapes),
    "llama": (_llama_config, _llama_shapes),
}


def _shrunk(full: int, scale: float, multiple: int) -> int:
    """Return a size so that three sizes shrunk together make the product about `scale` times as large."""
    return max(1, round(full * float(scale ** (1 / 3)) / multiple)) * multiple


def _write_shards(shapes: list[tuple[str, Shape]], directory: Path) -> None:
    shards: list[list[tuple[str, Shape]]] = [[]]
    room = MAX_SHARD_NBYTES
    total = 0
    for name, shape in shapes:
        nbytes = 2 * torch.Size(shape).numel()
        if nbytes > room:
            shards.append([])
            room = MAX_SHARD_NBYTES
        shards[-1].append((name, shape))
        room -= nbytes
        total += nbytes

    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: _values(name, shape) for name, shape in shard}, directory / file_name, {"format": "pt"})
        weight_map.update(dict.fromkeys((name for name, _ in shard), file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _values(name: str, shape: Shape) -> torch.Tensor:
    """Return random values that depend on nothing but the name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
