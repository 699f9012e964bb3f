"""Every error the library raises on purpose, as one small tree.

Each is also what plain code raises in its place (in brackets), so that an `except` written for that catches ours.

HfStreamError
|-- ArgumentError (ValueError)          an argument has a value that it cannot have
|-- ArgumentTypeError (TypeError)       an argument is of a type that it cannot be of
|-- FormatError (ValueError)            bytes that are not what their format says
|   |-- SafetensorsError                a safetensors file (SafetensorError)
|   |-- IndexFileError                  an index (json.JSONDecodeError)
|   |-- PickleError                     a pickle, or what it wants to run (pickle.UnpicklingError, EOFError)
|   `-- ArchiveError                    what torch.save has put around a pickle (RuntimeError, OSError)
|-- CheckpointError (ValueError, OSError)
|   |                                   files that do not make a whole checkpoint, or a destination that cannot be used
|   |-- MissingError                    something is not there (FileNotFoundError)
|   |-- AccessError                     permission is denied (PermissionError; safetensors: FileNotFoundError)
|   |-- FileKindError                   a file in the place of a directory, or the reverse (NotADirectoryError,
|   |                                   IsADirectoryError; huggingface_hub: FileNotFoundError)
|   |-- WriteError                      no room, or no such name there (safetensors: SafetensorError)
|   `-- MisfitError                     tensors and a module do not fit (RuntimeError)
|-- TensorNameError (KeyError)          a checkpoint has no tensor of that name (safe_open: SafetensorError)
|-- LayoutError (ValueError)            a layout and the names or shapes it was given do not fit
|-- LazyTensorError (RuntimeError)      something a tensor without data cannot do
`-- CopyError (OSError)                 moving bytes failed; says which tensor and which file (SafetensorError)
"""

from __future__ import annotations

import errno
import json
import pickle
from typing import Final

from safetensors import SafetensorError


class HfStreamError(Exception):
    """Base of every error that hf_stream raises on purpose."""

    def __str__(self) -> str:
        # A KeyError would quote it, an OSError that knows its file would write another one.
        return str(self.args[0]) if self.args else ""


class ArgumentError(HfStreamError, ValueError):
    """An argument has a value that it cannot have."""


class ArgumentTypeError(HfStreamError, TypeError):
    """An argument is of a type that it cannot be of."""


class FormatError(HfStreamError, ValueError):
    """A file's bytes do not follow its format."""


class SafetensorsError(FormatError, SafetensorError):
    """A safetensors file is damaged, cut short, or something else."""


class IndexFileError(FormatError, json.JSONDecodeError):
    """An index is not what an index is.

    Args:
        message: What is wrong.
        doc: The text that is no JSON.
        pos: Where in it, in characters.
    """

    def __init__(self, message: str, doc: str = "", pos: int = 0) -> None:
        super().__init__(message, doc, pos)
        self.args = (message,)


class PickleError(FormatError, pickle.UnpicklingError, EOFError):
    """A pickle is damaged, cut short, or wants to run what is not allowed."""


class ArchiveError(FormatError, RuntimeError, OSError):
    """What torch.save has put around a pickle is damaged or cut short."""


class CheckpointError(HfStreamError, ValueError, OSError):
    """Files do not make a whole checkpoint, or a destination cannot be used."""


class MissingError(CheckpointError, FileNotFoundError):
    """A file, a directory, or one of several shards is not there."""


class AccessError(CheckpointError, PermissionError, FileNotFoundError, SafetensorError):
    """A file or a directory may not be read, or not be written to."""


class FileKindError(CheckpointError, NotADirectoryError, IsADirectoryError, FileNotFoundError, SafetensorError):
    """A file stands where a directory is needed, or the reverse."""


class WriteError(CheckpointError, SafetensorError):
    """Something cannot be written where it was to go: there is no room, for one."""


class MisfitError(CheckpointError, RuntimeError):
    """Tensors do not fit the module that they were to be loaded into."""


class TensorNameError(HfStreamError, KeyError, SafetensorError):
    """A checkpoint has no tensor of that name."""


class LayoutError(HfStreamError, ValueError):
    """A layout does not fit the names or shapes it was given."""


class LazyTensorError(HfStreamError, RuntimeError):
    """A tensor that is not loaded was asked for something that needs its data."""


class CopyError(HfStreamError, OSError, SafetensorError):
    """Moving bytes failed."""


_BY_ERRNO: Final[dict[int, type[CheckpointError]]] = {
    errno.ENOENT: MissingError,
    errno.EACCES: AccessError,
    errno.EPERM: AccessError,
    errno.EROFS: AccessError,
    errno.ENOTDIR: FileKindError,
    errno.EISDIR: FileKindError,
    errno.EEXIST: FileKindError,
}


def because_of(cause: OSError, message: str, otherwise: type[CheckpointError] = CheckpointError) -> CheckpointError:
    """The error to raise from what the system has said: of the class that goes with its number, as Python does it.

    Args:
        cause: What the system has said.
        message: The message, which says it as well.
        otherwise: The class for all other numbers.
    """
    error = _BY_ERRNO.get(cause.errno or 0, otherwise)(message)
    error.errno, error.strerror, error.filename = cause.errno, cause.strerror, cause.filename
    return error
