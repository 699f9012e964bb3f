"""Whole checkpoints: open, save, load, convert, verify."""

from __future__ import annotations

from hf_stream.checkpoint.convert import Conversion, convert, plan_conversion, run_conversion
from hf_stream.checkpoint.load import load_into
from hf_stream.checkpoint.mapping import AnyLayout, apply_layout
from hf_stream.checkpoint.open import Checkpoint, open_checkpoint, open_files
from hf_stream.checkpoint.save import save_checkpoint
from hf_stream.checkpoint.staging import settle
from hf_stream.checkpoint.verify import Difference, Differences, verify
from hf_stream.checkpoint.writer import CheckpointWriter

__all__ = [
    "AnyLayout",
    "Checkpoint",
    "CheckpointWriter",
    "Conversion",
    "Difference",
    "Differences",
    "apply_layout",
    "convert",
    "load_into",
    "open_checkpoint",
    "open_files",
    "plan_conversion",
    "run_conversion",
    "save_checkpoint",
    "settle",
    "verify",
]
