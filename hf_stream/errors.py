"""Every error the library raises on purpose, as one small tree.

HfStreamError
|-- FormatError (ValueError)        bytes that are not what their format says: header, index, archive
|-- CheckpointError (ValueError)    files that do not make a whole checkpoint, or a destination that cannot be used
|-- LayoutError (ValueError)        a layout and the names or shapes it was given do not fit
|-- LazyTensorError (RuntimeError)  something a tensor without data cannot do
`-- CopyError (OSError)             moving bytes failed; says which tensor and which file
"""

from __future__ import annotations


class HfStreamError(Exception):
    """Base of every error that hf_stream raises on purpose."""


class FormatError(HfStreamError, ValueError):
    """A file's bytes do not follow its format."""


class CheckpointError(HfStreamError, ValueError):
    """Files do not make a whole checkpoint, or a destination cannot be used."""


class LayoutError(HfStreamError, ValueError):
    """A layout does not fit the names or shapes it was given."""


class LazyTensorError(HfStreamError, RuntimeError):
    """A tensor that is not loaded was asked for something that needs its data."""


class CopyError(HfStreamError, OSError):
    """Moving bytes failed."""
