"""Files that are none of ours: weights in the formats of others, and the pointers that Git LFS has in their place."""

from __future__ import annotations

import os
from typing import Final

_GGUF: Final = ".gguf"
_KINDS: Final = {
    _GGUF: "a GGUF file",
    ".onnx": "an ONNX file",
    ".h5": "an HDF5 file of Keras or TensorFlow",
    ".msgpack": "a msgpack file of Flax",
    ".npz": "an archive of numpy",
}
_PICKLES: Final = (".bin", ".ckpt", ".pt", ".pth")
_POINTER: Final = b"version https://git-lfs.github.com/spec/v1"
_MAX_POINTER_NBYTES: Final = 1024  # as Git LFS specifies it


def unread(path: str | os.PathLike[str]) -> str | None:
    """Why a file with this name is not read here, and what to do, to judge by its suffix; None if nothing is known."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _KINDS:
        return None
    directory, name = os.path.split(os.fspath(path))
    remedy = (
        f"load it with transformers, from_pretrained('{directory or '.'}', gguf_file='{name}'), and save that model"
        if suffix == _GGUF
        else "save it as safetensors with the library that wrote it"
    )
    return f"'{os.fspath(path)}' is {_KINDS[suffix]}, which hf_stream does not read; {remedy}"


def unwritten(path: str | os.PathLike[str]) -> str | None:
    """Why a destination with this name is not what its name says, and what to do; None if it may be a directory's."""
    suffix = os.path.splitext(path)[1].lower()
    kind = "a file of torch.save" if suffix in _PICKLES else _KINDS.get(suffix)
    if kind is None or os.fspath(path).endswith(os.sep) or os.path.isdir(path):
        return None
    then = ", and make the GGUF file of that with convert_hf_to_gguf.py of llama.cpp" if suffix == _GGUF else ""
    return (
        f"'{os.fspath(path)}' looks like {kind}, which is not written; name a file that ends in .safetensors, or a "
        f"directory, with a slash at its end if that is its name{then}"
    )


def pointer(name: str, head: bytes | bytearray | memoryview, nbytes: int) -> str | None:
    """What to say of a file that is a pointer of Git LFS, with what to do; None if it is none.

    Args:
        name: What errors call the file.
        head: Its first bytes, eight of them at least.
        nbytes: Its size.
    """
    known = min(len(head), len(_POINTER))
    if known < 8 or nbytes >= _MAX_POINTER_NBYTES or bytes(head[:known]) != _POINTER[:known]:
        return None
    return f"'{name}' is a Git LFS pointer and not the file itself: run 'git lfs pull' where it is, or download it"
