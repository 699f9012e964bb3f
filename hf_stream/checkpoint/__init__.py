"""Whole checkpoints: open, save, load, convert, verify."""

from __future__ import annotations

from hf_stream.checkpoint.components import open_repository
from hf_stream.checkpoint.conversion import Conversion, Kept, Outcome
from hf_stream.checkpoint.convert import convert, plan_conversion, run_conversion
from hf_stream.checkpoint.load import load_into
from hf_stream.checkpoint.mapping import AnyLayout, apply_layout
from hf_stream.checkpoint.nested import load_nested, open_nested, save_nested
from hf_stream.checkpoint.open import Checkpoint, open_checkpoint, open_files
from hf_stream.checkpoint.recovery import clean, settle
from hf_stream.checkpoint.save import save_checkpoint
from hf_stream.checkpoint.verify import Difference, Differences, verify
from hf_stream.checkpoint.writer import CheckpointWriter

__all__ = [
    "AnyLayout",
    "Checkpoint",
    "CheckpointWriter",
    "Conversion",
    "Difference",
    "Differences",
    "Kept",
    "Outcome",
    "apply_layout",
    "clean",
    "convert",
    "load_into",
    "load_nested",
    "open_checkpoint",
    "open_files",
    "open_nested",
    "open_repository",
    "plan_conversion",
    "run_conversion",
    "save_checkpoint",
    "save_nested",
    "settle",
    "verify",
]
