"""transformers: the calls users know, streaming."""

from __future__ import annotations

from hf_stream.integrations.transformers.enable import disable, enable, streaming
from hf_stream.integrations.transformers.load import from_pretrained
from hf_stream.integrations.transformers.mixin import StreamingMixin
from hf_stream.integrations.transformers.save import save_pretrained

__all__ = ["StreamingMixin", "disable", "enable", "from_pretrained", "save_pretrained", "streaming"]
