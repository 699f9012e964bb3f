"""Small trainings for the tests of the Trainer callback."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_dropout": 0.2,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "head_dim": 8}


@contextmanager
def quickly() -> Iterator[None]:
    """Trainer collects garbage, which takes longest where nothing new can be: in all that has been imported."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def moe(seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS))


def llama(seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def texts(count: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, SIZES["vocab_size"], (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(
    model: Any,
    output_dir: Path,
    *callbacks: Any,
    cls: type[Trainer] = Trainer,
    of_trainer: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """A trainer of four steps of two times two shuffled texts, which saves after the second and the fourth."""
    defaults = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
    }
    arguments = TrainingArguments(str(output_dir), **{**defaults, **arguments})
    return cls(model, arguments, train_dataset=texts(), callbacks=list(callbacks), **(of_trainer or {}))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(a: Any, b: Any, path: str = "") -> list[str]:
    """The places where two nestings are not the same, bit for bit."""
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__}, {type(b).__name__}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{path}: keys"]
        return [place for key in a for place in differing(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [place for n, (x, y) in pairs for place in differing(x, y, f"{path}/{n}")]
    same = a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)
    return [] if same else [path]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
