"""Copies between storages: what to copy (Region, Copy, Plan) and the executor that does it."""

from __future__ import annotations

from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE, execute
from hf_stream.copying.plan import Copy, Plan
from hf_stream.copying.region import Region

__all__ = ["DEFAULT_BUFFER_SIZE", "Copy", "Plan", "Region", "execute"]
