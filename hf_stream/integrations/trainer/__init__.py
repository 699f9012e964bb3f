"""transformers.Trainer: checkpoints that are streamed, whole or absent, and resumed strictly."""

from __future__ import annotations

from hf_stream.integrations.trainer.callback import StreamingCheckpointCallback

__all__ = ["StreamingCheckpointCallback"]
