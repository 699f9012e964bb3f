"""What a checkpoint holds beside the weights: states of optimizer, scheduler, gradient scaler and random generators.

Trainer pickles them. Here each is a safetensors file; where only Trainer's own is there, Trainer reads it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_pt_utils import safe_globals

from hf_stream.checkpoint.nested import load_nested, save_nested
from hf_stream.integrations.trainer.settings import Settings

OPTIMIZER = "optimizer.safetensors"
SCHEDULER = "scheduler.safetensors"
SCALER = "scaler.safetensors"

Plain = Callable[..., Any]


def save_optimizer_and_scheduler(settings: Settings, trainer: Any, plain: Plain, output_dir: str) -> None:
    """In place of `Trainer._save_optimizer_and_scheduler`."""
    if trainer.args.should_save:
        _save(trainer.optimizer, Path(output_dir, OPTIMIZER), settings)
        _save(trainer.lr_scheduler, Path(output_dir, SCHEDULER), settings)


def load_optimizer_and_scheduler(settings: Settings, trainer: Any, plain: Plain, checkpoint: str | None) -> None:
    """In place of `Trainer._load_optimizer_and_scheduler`."""
    if checkpoint is None or not Path(checkpoint, OPTIMIZER).is_file():
        plain(checkpoint)
        return
    args = trainer.args
    # With several processes on one machine there may be more room on their devices than in its memory.
    device = args.device if args.world_size > 1 else torch.device("cpu")
    trainer.optimizer.load_state_dict(load_nested(Path(checkpoint, OPTIMIZER), device))
    trainer.lr_scheduler.load_state_dict(load_nested(Path(checkpoint, SCHEDULER)))


def save_scaler(settings: Settings, trainer: Any, plain: Plain, output_dir: str) -> None:
    """In place of `Trainer._save_scaler`."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None and trainer.args.should_save:
        _save(scaler, Path(output_dir, SCALER), settings)


def load_scaler(settings: Settings, trainer: Any, plain: Plain, checkpoint: str | None) -> None:
    """In place of `Trainer._load_scaler`."""
    if checkpoint is None or not Path(checkpoint, SCALER).is_file():
        plain(checkpoint)
    else:
        trainer.accelerator.scaler.load_state_dict(load_nested(Path(checkpoint, SCALER)))


def save_rng_state(settings: Settings, trainer: Any, plain: Plain, output_dir: str) -> None:
    """In place of `Trainer._save_rng_state`, which knows every device's generators: what it writes is rewritten."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plain(scratch)
        for file in Path(scratch).iterdir():
            with safe_globals():  # type: ignore[no-untyped-call]
                states = torch.load(file, weights_only=True)
            save_nested(states, Path(output_dir, file.with_suffix(".safetensors").name))


def load_rng_state(settings: Settings, trainer: Any, plain: Plain, checkpoint: str | None) -> None:
    """In place of `Trainer._load_rng_state`, which is given what it would have written."""
    name = "rng_state" if trainer.args.world_size <= 1 else f"rng_state_{trainer.args.process_index}"
    if checkpoint is None or not Path(checkpoint, f"{name}.safetensors").is_file():
        plain(checkpoint)
        return
    with tempfile.TemporaryDirectory() as scratch:
        torch.save(load_nested(Path(checkpoint, f"{name}.safetensors")), Path(scratch, f"{name}.pth"))
        plain(scratch)


def _save(owner: Any, path: Path, settings: Settings) -> None:
    save_nested(owner.state_dict(), path, buffer_size=settings.buffer_size, progress=settings.progress)
