"""What the callback was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.layouts.composable import TwoWay


@dataclass(frozen=True)
class Settings:
    """How checkpoints are saved and loaded; see `StreamingCheckpointCallback`."""

    layout: TwoWay | None = None
    max_shard_size: int | str = "50GB"
    durable: bool | None = None
    buffer_size: int = DEFAULT_BUFFER_SIZE
    progress: bool | Progress | None = False
