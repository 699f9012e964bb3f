"""Where bytes live: local files and memory."""

from __future__ import annotations

from hf_stream.storage.base import Storage
from hf_stream.storage.file import FileIdentity, FileStorage
from hf_stream.storage.memory import MemoryStorage, advise_huge_pages

__all__ = ["FileIdentity", "FileStorage", "MemoryStorage", "Storage", "advise_huge_pages"]
