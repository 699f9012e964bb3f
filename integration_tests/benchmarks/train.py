"""Saving a checkpoint in the middle of training, with AdamW's states: plain Trainer, and Trainer with our callback.

python integration_tests/benchmarks/train.py --scale 0.63

That is a model of 2.3 GB, which needs 16 GB of memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import harness
import models
from harness import Case, Contender, Work


def with_trainer(source: Path, target: Path) -> Work:
    """Save with plain Trainer."""
    return _prepare(source, target)


def with_hf_stream(source: Path, target: Path) -> Work:
    """Save with Trainer and the callback."""
    from hf_stream import StreamingCheckpointCallback

    return _prepare(source, target, StreamingCheckpointCallback())


def _prepare(source: Path, target: Path, *callbacks: Any) -> Work:
    """Train for one step; the work is the checkpoint after it."""
    import torch
    from transformers import Trainer, TrainingArguments

    model = models.load_into_memory(source)
    row = torch.arange(32) % model.config.vocab_size
    arguments = TrainingArguments(
        str(target),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        optim="adamw_torch",
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}], callbacks=list(callbacks))
    trainer.train()

    def work() -> Path:
        trainer._save_checkpoint(model, trial=None)
        # Optimizer states are in formats of their own: what can be compared are the weights.
        weights = target / "weights"
        weights.mkdir()
        for file in (target / "checkpoint-1").glob("model*.safetensors"):
            os.link(file, weights / file.name)
        return weights

    return work


CASES = {
    "checkpoint": Case(
        "Save a checkpoint of Qwen3-MoE with AdamW",
        "qwen3-moe",
        {"transformers": Contender(with_trainer), "hf_stream": Contender(with_hf_stream)},
        ["transformers"],
    )
}

if __name__ == "__main__":
    harness.main(CASES)
