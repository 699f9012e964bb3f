"""Opens regular files and nothing else: a FIFO, a device or a socket in a checkpoint must not hold up who reads it."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from hf_stream.errors import CheckpointError, FileKindError, HfStreamError, because_of
from hf_stream.formats.foreign import pointer

# An index with a million tensors takes 100 MB, a config some kilobytes.
MAX_JSON_NBYTES: Final = 100_000_000

_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}
# What systems say of a socket, and of a directory that is to be written.
_NOT_TO_BE_OPENED: Final = (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP, errno.EISDIR)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file; anything else is an error at once, where a plain `open` may wait for ever.

    Args:
        path: The file.
        flags: As for `os.open`.

    Returns:
        The descriptor.

    Raises:
        FileKindError: It is no regular file.
        OSError: It cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _NOT_TO_BE_OPENED:
            raise
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            raise
    else:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            return fd
        os.close(fd)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    raise FileKindError(f"'{os.fspath(path)}' is {kind} and not a regular file; put the file there, or remove it")


@contextmanager
def opening(path: str | os.PathLike[str]) -> Iterator[None]:
    """Run a block that opens files, in which what the system says becomes one of our errors, and names the file.

    Args:
        path: What the user has named.
    """
    try:
        yield
    except HfStreamError:
        raise
    except OSError as error:
        file = error.filename or path
        raise because_of(
            error, f"'{os.fsdecode(file)}' cannot be opened: {error.strerror or error}; remedy that, or use a copy"
        ) from error


def read_small(path: str | os.PathLike[str], limit: int = MAX_JSON_NBYTES) -> bytes:
    """All of a file that is not larger than `limit`.

    Raises:
        CheckpointError: It is larger, or no regular file.
        OSError: It cannot be read.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > limit:
            raise CheckpointError(f"'{os.fspath(path)}' has {nbytes} bytes, the limit is {limit}; get the file again")
        content = bytearray()
        while len(content) <= limit and (piece := file.read(limit + 1 - len(content))):
            content += piece
    return bytes(content)


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object that a small file holds.

    Raises:
        CheckpointError: It holds something else, is too large, or no regular file.
        OSError: It cannot be read.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"'{os.fspath(path)}' must hold a JSON object, got {type(value).__name__}")
    return value


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a small file of JSON holds.

    Raises:
        CheckpointError: It is not JSON, too large, or no regular file.
        OSError: It cannot be read.
    """
    content = read_small(path)
    try:
        return json.loads(content)
    except RecursionError:
        raise CheckpointError(f"'{os.fspath(path)}' nests deeper than can be followed; get the file again") from None
    except ValueError as error:
        if fact := pointer(os.fspath(path), content, len(content)):
            raise CheckpointError(fact) from None
        raise CheckpointError(f"'{os.fspath(path)}' is not JSON: {error}; get the file again") from None
