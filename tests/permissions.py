"""Permissions that count for everybody: the superuser may do with files what others may not unless it gives that up."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def in_force() -> Iterator[None]:
    """Run a block in which this thread may do with files what their permissions say."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    before = (ctypes.c_uint32 * 6)()  # twice: effective, permitted, inheritable
    assert libc.capget(header, before) == 0, os.strerror(ctypes.get_errno())
    without = (ctypes.c_uint32 * 6)(*before)
    without[0] &= ~_OVERRIDES
    assert libc.capset(header, without) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0, os.strerror(ctypes.get_errno())
