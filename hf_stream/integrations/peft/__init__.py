"""PEFT: fill a wrapped model's base, and save adapters, streaming."""

from __future__ import annotations

from hf_stream.integrations.peft.load import load_base_model
from hf_stream.integrations.peft.save import save_adapters

__all__ = ["load_base_model", "save_adapters"]
