"""What a checkpoint holds beside the weights: states of optimizer, scheduler, gradient scaler and random generators.

Trainer pickles them. Here each is a safetensors file. Where Trainer's own file is there, Trainer reads that: our
checkpoints begin as empty directories, so it has come later, from a run without the callback.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME
from transformers.trainer_pt_utils import safe_globals

from hf_stream.checkpoint.nested import load_nested, save_nested
from hf_stream.integrations.trainer.settings import Settings

OPTIMIZER = "optimizer.safetensors"
SCHEDULER = "scheduler.safetensors"
SCALER = "scaler.safetensors"

logger = logging.getLogger(__name__)

Plain = Callable[..., Any]

# What torch reads without running code is one list for all threads, and transformers takes its entries off again.
_safe_globals_lock = threading.Lock()


def save_optimizer_and_scheduler(settings: Settings, trainer: Any, plain: Plain, output_dir: str) -> None:
    """In place of `Trainer._save_optimizer_and_scheduler`."""
    if trainer.args.should_save:
        _save(trainer.optimizer, Path(output_dir, OPTIMIZER), settings)
        _save(trainer.lr_scheduler, Path(output_dir, SCHEDULER), settings)


def load_optimizer_and_scheduler(settings: Settings, trainer: Any, plain: Plain, checkpoint: str | None) -> None:
    """In place of `Trainer._load_optimizer_and_scheduler`."""
    if checkpoint is None or not _is_ours(checkpoint, OPTIMIZER, OPTIMIZER_NAME):
        if checkpoint is not None and not Path(checkpoint, OPTIMIZER_NAME).is_file():
            logger.warning("'%s' has no state of an optimizer: training goes on with a new one", checkpoint)
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
    if checkpoint is None or not _is_ours(checkpoint, SCALER, SCALER_NAME):
        plain(checkpoint)
    else:
        trainer.accelerator.scaler.load_state_dict(load_nested(Path(checkpoint, SCALER)))


def save_rng_state(settings: Settings, trainer: Any, plain: Plain, output_dir: str) -> None:
    """In place of `Trainer._save_rng_state`, which knows every device's generators: what it writes is rewritten."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plain(scratch)
        for file in Path(scratch).iterdir():
            with _safe_globals_lock, safe_globals():  # type: ignore[no-untyped-call]
                states = torch.load(file, weights_only=True)
            save_nested(states, Path(output_dir, file.with_suffix(".safetensors").name), durable=settings.durable)


def load_rng_state(settings: Settings, trainer: Any, plain: Plain, checkpoint: str | None) -> None:
    """In place of `Trainer._load_rng_state`, which is given what it would have written."""
    name = "rng_state" if trainer.args.world_size <= 1 else f"rng_state_{trainer.args.process_index}"
    if checkpoint is None or not _is_ours(checkpoint, f"{name}.safetensors", f"{name}.pth"):
        with _safe_globals_lock:
            plain(checkpoint)
        return
    with tempfile.TemporaryDirectory() as scratch:
        torch.save(load_nested(Path(checkpoint, f"{name}.safetensors")), Path(scratch, f"{name}.pth"))
        with _safe_globals_lock:
            plain(scratch)


def _is_ours(checkpoint: str, name: str, plain_name: str) -> bool:
    return Path(checkpoint, name).is_file() and not Path(checkpoint, plain_name).is_file()


def _save(owner: Any, path: Path, settings: Settings) -> None:
    save_nested(
        owner.state_dict(),
        path,
        durable=settings.durable,
        buffer_size=settings.buffer_size,
        progress=settings.progress,
    )
