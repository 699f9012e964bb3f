"""Where bytes live: local files and memory."""

from __future__ import annotations

from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileStorage
from hf_stream.storage.memory import MemoryStorage, advise_huge_pages, trim_heap
from hf_stream.storage.opened import FileIdentity

__all__ = ["FileIdentity", "FileStorage", "MemoryStorage", "Storage", "advise_huge_pages", "trim_heap"]
